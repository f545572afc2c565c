"""Keys that no row sees were loaded unchecked, and zero times NaN is NaN.

Summary:
A tile extends past the keys of a request. Whatever is stored there was loaded and multiplied by a
probability of zero, which is harmless only if it is finite.
Motivation:
Recycled pages are not zeroed. Freed memory of another dtype, or of a run that overflowed, contains
NaN and infinities.
Mechanism:
1. The last tile of a request covers slots past its end, in pages it holds but has not filled.
2. Their scores are masked; their probabilities are exactly 0.
3. P V is computed over the whole tile: 0 * NaN.
Key functions:
SGLang's unified pool, which since then zeroes pages on hand-out. Here the kernel function
`load_range`: keys that no row of the block sees are not loaded. The revert rounds the range up to
the next multiple of 16 keys.
Symptom:
NaN logits, only after another request has left NaN or infinities behind. The lab's pools are full
of NaN from the start.
Risk and impact:
One request's overflow breaks other requests; without NaN it is invisible.
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
    """Loads whole vectors of 16 keys, past the last visible one."""
    return first, (last + 15) // 16 * 16


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def kernel() -> Any:
        return attend.build(load_range=load_range)

    return kernel
