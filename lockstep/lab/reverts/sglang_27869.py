"""Rows per block followed the batch: upstream it changed bits, here it cannot.

Summary:
A kernel chose the number of rows per block, and a fast path for small batches, by the number of
rows in the batch.
Motivation:
Small batches leave the machine idle unless blocks get smaller.
Mechanism:
1. Batch size decides the block shape.
2. Upstream the block shape decided the order of additions inside a row.
Key functions:
SGLang's kernels for Qwen3.5 in deterministic mode. Here `attention.cpu.block_rows`, the number of
rows per block, which the revert divides by three.
Symptom:
Upstream: log-probabilities changed with the batch size. Here: none.
Risk and impact:
An equivalent mutant. It is kept because block sizes are tuned for speed, and the proof says why
they may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#27869"
TARGET = "lockstep.attention.cpu:block_rows"
BACKEND = "cpu"
CELLS = ("mixed/dense",)
RELATED = ("sglang-26412", "vllm-51902", "lockstep-rescale")
EQUIVALENT = (
    "A block decides which rows share staged tiles, and nothing else. A row's scores, sums and "
    "products run over its own visible keys in "
    "tiles and splits aligned to position 0; a tile it does not see leaves its state untouched "
    "(its rescale is exactly 1). So every "
    "partition into blocks gives every row the same sequence of operations, hence the same bits."
)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def block_rows(spec: GroupSpec) -> int:
        return max(1, int(old(spec)) // 3)

    return block_rows
