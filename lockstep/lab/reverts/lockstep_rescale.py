"""A tile that a row does not see changed the row's bits.

Summary:
Online softmax rescales its state when the maximum changes. Computed from a rounded product, the
factor is not exactly 1 when the maximum stays the same, and a masked tile is no longer a no-op.
Motivation:
Met while measuring our own order (numerics, traps): bits differed between blocks of 64 and of 128
rows.
Mechanism:
1. alpha = exp2(fma(m_old, c, -round(m_new * c))): the fma is exact, the other product is rounded.
2. With m_new == m_old the exponent is the rounding error, so alpha is slightly above or below 1.
3. A row that shares its block with rows that see further visits tiles of which it sees nothing, and
   its state is multiplied by alpha each time.
4. The number of such tiles depends on the block, hence on the chunk and the batch.
Key functions:
The kernel function `rescale`, which subtracts the maxima first.
Symptom:
Values are right to within rounding. Bits depend on the chunking.
Risk and impact:
It breaks the promise of equal bits and nothing else; only bitwise comparisons over chunk sizes find
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lockstep.kernels.cpu import attend
from lockstep.kernels.cpu.elementary import exp2
from lockstep.kernels.cpu.lanes import fma, mul

SOURCE = "numerics, trap 1 (measured, never released)"
TARGET = "lockstep.attention.cpu:kernel"
BACKEND = "cpu"
CELLS = ("mixed/dense",)
RELATED = ("sglang-26412", "vllm-51902")


def rescale(m: Any, m_new: Any, c: Any) -> Any:
    """Subtracts a rounded product from one that is not rounded."""
    return exp2(fma(m, c, -mul(m_new, c)))


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def kernel() -> Any:
        return attend.build(rescale=rescale)

    return kernel
