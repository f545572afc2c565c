"""Of tokens with equal sums the last one was chosen.

Summary:
The chosen token has the largest score plus noise, and among equal sums the smallest id. The search
kept the last of them.
Motivation:
`>=` and `>` give the same answer unless two sums are equal, and sums with noise hardly ever are.
Mechanism:
1. Scores are large (an untrained head, a small temperature), so a float32 sum has few bits left for
   the noise.
2. Several tokens have the same sum, and it is the largest.
3. The kernel takes the last one, a tensor's argmax the first: two devices, two answers.
Key functions:
The kernel function `noisy_best` of the sampling kernel.
Symptom:
A different token between devices, or between the kernel and a recomputation, at small temperatures.
Risk and impact:
Rare, and hard to explain when it happens: logits and noise agree in all bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.kernels.cpu import sample
from lockstep.kernels.cpu.sample import (
    GROUPS,
    MINUS_INF,
    beaten,
    block_noise,
    largest_key,
    score_of,
)
from lockstep.sample.formulas import NO_TOKEN

SOURCE = "class: ties by the last id"
TARGET = "lockstep.kernels.cpu.sample:compiled"
CELLS = ("sample/llama",)
RELATED = ("lockstep-beaten-block", "lockstep-expert-ties")


def noisy_best(x: Any, counter: Any) -> Any:
    """Returns the last token among those with the largest sum."""
    words, noise = np.empty(4 * GROUPS, np.int64), np.empty(4 * GROUPS, np.float32)
    best, token = MINUS_INF, NO_TOKEN
    for first in range(0, len(x), 4 * GROUPS):
        part = x[first : first + 4 * GROUPS]
        if beaten(score_of(largest_key(part)), best):
            continue
        block_noise(first, counter, words, noise)
        for i in range(len(part)):
            y = np.float32(part[i] + noise[i % 4 * GROUPS + i // 4])
            if y >= best:
                best, token = y, first + i
    return token


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> Any:
        return sample.build(noisy_best=noisy_best)

    return compiled
