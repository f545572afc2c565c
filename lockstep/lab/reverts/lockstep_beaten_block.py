"""A vocabulary block that could still win was skipped.

Summary:
Sampling noise is generated for 256 tokens at a time. A block is skipped if its best score plus the
largest possible noise cannot reach the best sum so far. The bug left the largest possible noise out
of that comparison.
Motivation:
Most tokens of a large vocabulary are far from winning, and skipping them is what makes sampling
fast.
Mechanism:
1. The first block has a token whose score plus noise is 9.
2. The best score of the second block is 4. Its noise may be up to 22.9, so a token of it might win.
3. Without that margin, 4 < 9 skips the block. A later block loses to any lucky token of an earlier
   block.
Key functions:
The kernel function `beaten` of the sampling kernel, which `noisy_best` calls for every block.
Symptom:
Plausible tokens from a wrong distribution, for vocabularies above 256 only: small token ids are
chosen too often.
Risk and impact:
Every sampled answer of every real model is affected. Tests with small vocabularies have one block
and cannot show it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lockstep.kernels.cpu import sample
from lockstep.kernels.cpu.sample import MINUS_INF

SOURCE = "class: a shortcut without its margin"
TARGET = "lockstep.kernels.cpu.sample:compiled"
CELLS = ("sample/llama",)
RELATED = ("sglang-33423", "lockstep-noisy-tie")


def beaten(bound: Any, best: Any) -> Any:
    """Compares the block's best score, without noise, to the best sum of score and noise."""
    return bound == MINUS_INF or bound < best


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> Any:
        return sample.build(beaten=beaten)

    return compiled
