"""Keys that no row may see were loaded as they lay, and zero times NaN is NaN.

Summary:
A tile reaches past the keys of a request. What lies there was loaded and multiplied by a
probability of zero, which is only harmless
while it is a number.
Motivation:
Recycled pages are not zeroed. Freed memory of another dtype, or of a run that overflowed, holds NaN
and infinities.
Mechanism:
1. The last tile of a request covers slots behind its end, in pages it holds but has not filled.
2. Their scores are masked, their probabilities are exactly 0.
3. P V is computed over the whole tile: 0 * NaN.
Key functions:
SGLang's unified pool, which zeroes pages on hand-out since. Here the kernel text `load_range`: keys
that no row of the block sees are not
touched. The revert rounds the range up to the next 16 keys.
Symptom:
NaN logits, only after some other request has left something bad behind. The lab's pools are full of
NaN from the start.
Risk and impact:
One request's overflow takes others down; without NaN it is invisible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lockstep.kernels.cpu import attend

SOURCE = "sgl-project/sglang#33974"
TARGET = "lockstep.attention.cpu:kernel"
BACKEND = "cpu"
CELLS = ("multi-item/dense",)
RELATED = ("flashinfer-3717",)


def load_range(first: Any, last: Any, tile: Any) -> Any:
    """Whole vectors, whatever lies there."""
    return first, (last + 15) // 16 * 16


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def kernel() -> Any:
        return attend.build(load_range=load_range)

    return kernel
