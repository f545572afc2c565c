"""The longest neighbour determined the tile of every request.

Summary:
A kernel configuration, and with it the order of additions, was chosen by the largest number of new
rows in the batch.
Motivation:
Large tiles are faster for long prefills, and max_seqlen_q is known when the kernel is launched.
Mechanism:
1. A batch of short requests runs with one tile shape.
2. A neighbour of ten rows instead of nine joins.
3. The keys of every request are now split differently, and the last bits of every request change.
Key functions:
FlashAttention 3 as used by vLLM's batch-invariant mode (an open issue when read). Here
`attention.cpu.Backend.bind`.
Symptom:
Bits depend on the neighbours; values do not.
Risk and impact:
A deterministic mode that passes uniform tests and fails in traffic. Every such test needs
neighbours of other lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket
from lockstep.types import GroupSpec

SOURCE = "vllm-project/vllm#51902"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("mixed/dense", "fork/dense")
RELATED = ("sglang-26412", "sglang-10721", "sglang-27869")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Any) -> Any:
        handle = old(self, spec, bucket, views, variant)
        long = np.diff(views.q_indptr).max(initial=0) >= 10
        return replace(handle, split=handle.tile) if long else handle

    return bind
