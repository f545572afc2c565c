"""Several rows per request were verified without causality.

Summary:
The tensor-core decode wrapper plans one row per request. Given several, it computed them all, but
as if each were the last one.
Motivation:
Multi-token decode looks like decode with more rows. For one row causality is nothing: it sees all
keys. For several it is not.
Mechanism:
1. q_len_per_req > 1 rows arrive for every request.
2. The plan has no causal mask, because a decode step needs none.
3. Every row sees all keys of the request, those of the later drafts too.
Key functions:
plan of BatchDecodeWithPagedKVCacheWrapper. Here `attention.cpu.Backend.lower`: there is no decode
kernel with its own idea of visibility,
each row brings its own range.
Symptom:
Verification accepts and rejects by wrong logits: the target model has seen the answer.
Risk and impact:
Silent; speculation that changes what the model says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.kernels.cpu.attend import Rows
from lockstep.plan.image import Views
from lockstep.plan.step import Group, StepPlan
from lockstep.types import INT32_MAX

SOURCE = "flashinfer-ai/flashinfer#3871"
TARGET = "lockstep.attention.cpu:Backend.lower"
CELLS = ("verify-chain/dense",)
RELATED = ("sglang-26512", "sglang-10172")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def lower(self: Any, plan: StepPlan, group: Group, views: Views) -> Any:
        handle = old(self, plan, group, views)
        if (
            plan.bucket.width < 2
            or plan.bucket.tail
            or not plan.positions[plan.q_indptr[plan.request]].all()
        ):
            return handle
        last = handle.rows.hi[plan.q_indptr[plan.request + 1] - 1]
        table = handle.table._replace(start=np.full_like(last, INT32_MAX))
        return replace(handle, table=table, rows=Rows(handle.rows.lo, last))

    return lower
