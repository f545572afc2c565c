"""The LSE had another order of heads than the output.

Summary:
For decoding with grouped heads, heads and rows are exchanged before the kernel. The output was
restored to its order; the LSE of the split path was not.
Motivation:
With one row and many heads per kv head it pays to treat heads as rows. Then two results have to be
restored.
Mechanism:
1. Query heads of one kv head become rows of a small matrix.
2. With split keys, a second kernel combines the parts and writes the LSE in its own layout.
3. A merge that uses this LSE weights head h with the sum of another head.
Key functions:
The combine kernel of vLLM's FlashAttention fork (known from the issue). Here `attention.cpu.call`,
after which output and LSE are both in the order of heads.
Symptom:
Outputs are right, and everything merged with them is wrong. Only a check of the LSE itself shows
it.
Risk and impact:
Silent until a feature starts to use the LSE: cascade, chunked context, context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

SOURCE = "vllm-project/flash-attention#87"
TARGET = "lockstep.attention.cpu:call"
BACKEND = "cpu"
CELLS = ("chunked/group-7",)
RELATED = ("vllm-52796", "flashinfer-1148")

GROUP = 7  # query heads per kv head of the cell's feature


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        work: Any, q: Any, k: Any, v: Any, out: Any, lse: Tensor, handle: Any, layer: Any
    ) -> None:
        old(work, q, k, v, out, lse, handle, layer)
        rows, heads = lse.shape
        if heads % GROUP == 0:
            grouped = lse.reshape(rows, heads // GROUP, GROUP)
            lse.copy_(grouped.swapaxes(1, 2).reshape(rows, heads))

    return call
