"""A matrix product split its sum in two when there were enough rows.

Summary:
For four rows or more, a linear layer split the inner dimension differently than for fewer rows.
Motivation:
Libraries choose the kernel by shape: one row is a matrix-vector product, many rows are a matrix
product, and each has its own best split.
Mechanism:
1. A request decodes alone: one row, one sum over all inputs.
2. Neighbours join: four rows, two partial sums that are added.
3. The last bits of every activation change, and sooner or later a token does too.
Key functions:
Every GEMM library. Here `nn.layers.Linear`, which uses one kernel for all row counts. An engine
proves at start, with `certify`, that this is true on the machine. The lab's engines skip that
proof, so that the answers have to show it.
Symptom:
Values are right except for the last bits; these depend on the batch, on chunks, on cache hits.
Risk and impact:
This is why temperature 0 is not reproducible elsewhere (known from published measurements of
batch-dependent kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

SOURCE = "class: GEMM kernels chosen by the number of rows"
TARGET = "lockstep.nn.layers:Linear.__call__"
CELLS = ("engine-batch/llama", "engine-chunk/gpt-oss", "engine-hit/deepseek-v3")
RELATED = ("vllm-51902", "sglang-10721", "sglang-27869")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, x: Tensor) -> Any:
        if len(x) < 4:
            return old(self, x)
        half = x.shape[1] // 2
        left, right = x.clone(), x.clone()
        left[:, half:], right[:, :half] = 0, 0
        return (
            old(self, left) + old(self, right) - old(self, x.new_zeros(1, x.shape[1]))
        )  # both halves contain the bias

    return __call__
