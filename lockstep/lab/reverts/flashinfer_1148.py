"""Rows were mapped to tokens by a shift where the head group size is not a power of two.

Summary:
Query heads that share a kv head are packed with their tokens into one row index. Mapping a row back
to its token needs a division by the group size; an inexact division gave a wrong token for some
rows.
Motivation:
Group sizes are nearly always 1, 2, 4 or 8. Seven is not a power of two.
Mechanism:
1. Row r of a block is token r / group, head r % group.
2. The fast division is exact for powers of two only.
3. Some rows use the position of another token for their causal limit.
Key functions:
The packed GQA index in FlashInfer's prefill kernel. Here the kernel function `spans`, which
computes what each row sees of a tile; the kernel is rebuilt with the wrong one.
Symptom:
Rare causality errors with group sizes such as 7; the lab has a feature of that size.
Risk and impact:
Silent, for a handful of models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.kernels.cpu import attend

SOURCE = "flashinfer-ai/flashinfer#1148"
TARGET = "lockstep.attention.cpu:kernel"
BACKEND = "cpu"
CELLS = ("chunked/group-7",)
RELATED = ("flashinfer-4525", "vllm-flash-attention-87")


def spans(job: Any, scratch: Any, unit: Any, begin: Any, end: Any, position: Any) -> Any:
    """The kernel's own function, but it divides rows by the next power of two of the group."""
    tile, group, power = job.tile, job.group, np.int64(1)
    while power < group:
        power *= 2
    hull_first, hull_last = tile, np.int64(0)
    for nth in range((end - begin) * group):
        token, row = begin + nth // power, (begin - unit.begin) * group + nth
        first = max(np.int64(job.lo[token]) - position, np.int64(0))
        last = min(np.int64(job.hi[token]) - position, tile)
        if first < last:
            hull_first, hull_last = min(hull_first, first), max(hull_last, last)
        else:
            first, last = np.int64(0), np.int64(0)
        scratch.first[row] = first
        scratch.last[row] = last
    return hull_first, hull_last


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def kernel() -> Any:
        return attend.build(spans=spans)

    return kernel
