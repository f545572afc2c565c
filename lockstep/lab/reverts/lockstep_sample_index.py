"""All completions of one request were the same.

Summary:
n completions share a prompt and a seed. The completion index, which makes their noise differ, was
left out of the noise's key.
Motivation:
Noise was keyed by seed and position before `n` existed.
Mechanism:
1. A request asks for three completions.
2. All three are forked from one row, with one seed, at one position.
3. They draw the same noise, choose the same token, and never diverge.
Key functions:
`sample.formulas.counter`: noise is keyed by seed, completion and position.
Symptom:
Three equal answers. Each is right by itself, so a comparison with a single request of the same seed
does not show it.
Risk and impact:
Best-of-n, voting and self-consistency cost n times as much and are worth one answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: noise not keyed by completion"
TARGET = "lockstep.sample.formulas:counter"
CELLS = ("engine-n/llama", "sample/llama")
RELATED = ("sglang-7207", "sglang-11096")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def counter(seed: int, index: Any, position: Any) -> Any:
        return old(seed, index * 0, position)

    return counter
