"""Merging two empty parts gives NaN.

Summary:
A row that sees nothing of either of two parts has a maximum of minus infinity in both, and the
merge subtracts one from the other.
Motivation:
Split keys, cascades and chunked contexts merge partial attention results by their log-sum-exp. vLLM
met the empty case three times in different merges, FlashAttention-2 returned plus infinity for it,
and TensorRT-LLM a finite number.
Mechanism:
1. Each part of the keys yields a maximum, a sum and an accumulator. A part of which the row sees
   nothing has a maximum of -inf.
2. The merge takes the larger maximum, n, and weighs each part with exp2(m - n).
3. If both are -inf then m - n is NaN, and so are the weights, the sum and the accumulator from
   there on.
4. In a batch this needs a row whose window begins after a part that its neighbours in the block
   still see.
Key functions:
The kernel function `weights`, which uses 0 instead of n when n is -inf, so that both weights are
exp2(-inf) = 0.
Symptom:
NaN rows, only with a window, only past the first split, and only where rows of one block see
different splits.
Risk and impact:
One NaN key poisons every later layer of the request. The trigger is a length, not a load, so tests
with short prompts never see it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lockstep.kernels.cpu import attend
from lockstep.kernels.cpu.elementary import exp2
from lockstep.kernels.cpu.lanes import maximum, sub

SOURCE = "vllm-project/vllm#28181, #39148, #27491"
TARGET = "lockstep.attention.cpu:kernel"
BACKEND = "cpu"
CELLS = ("extend-cold/window",)
RELATED = ("vllm-52796", "sglang-33974")


def weights(m: Any, m_other: Any) -> Any:
    """Subtracts the larger maximum even if it is -inf."""
    top = maximum(m, m_other)
    return top, exp2(sub(m, top)), exp2(sub(m_other, top))


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def kernel() -> Any:
        return attend.build(weights=weights)

    return kernel
