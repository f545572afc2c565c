"""The LSE came out in another order of heads than the output.

Summary:
For decoding with grouped heads, heads and rows are exchanged before the kernel. The output was put
back in order, the LSE of the split
path was not.
Motivation:
With one row and many heads per kv head it pays to treat heads as rows. Whoever does so has two
results to put back.
Mechanism:
1. Query heads of one kv head become rows of a small matrix.
2. With split keys, a second kernel combines the parts and writes the LSE in its own layout.
3. Whoever merges by this LSE weighs head h with the sum of another head.
Key functions:
The combine kernel of vLLM's FlashAttention fork (known from the issue). Here
`attention.cpu.Backend.attend`, which returns both.
Symptom:
Outputs are right, and everything merged with them is wrong. Only a look at the LSE itself shows it.
Risk and impact:
Silent until a feature starts to use the LSE: cascade, chunked context, context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.kv.pool import Keys
from lockstep.types import AttnSpec

SOURCE = "vllm-project/flash-attention#87"
TARGET = "lockstep.attention.cpu:Backend.attend"
CELLS = ("chunked/group-7",)
RELATED = ("vllm-52796", "flashinfer-1148")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def attend(self: Any, q: Tensor, keys: Keys, handle: Any, spec: AttnSpec) -> Any:
        out, lse = old(self, q, keys, handle, spec)
        grouped = lse.view(len(q), handle.spec.kv_heads, handle.spec.group_size)
        return out, grouped.transpose(1, 2).reshape(len(q), -1)

    return attend
