"""Several rows per request were verified without causality.

Summary:
The tensor-core decode wrapper plans one row per request. Given several, it computed each row as if
it were the last one.
Motivation:
Multi-token decode looks like decode with more rows. A single row needs no causal mask, because it
sees all keys; several rows do.
Mechanism:
1. Every request has q_len_per_req > 1 rows.
2. The plan has no causal mask, because a decode step needs none.
3. Every row sees all keys of the request, including those of later draft tokens.
Key functions:
plan of BatchDecodeWithPagedKVCacheWrapper. Here `attention.cpu.Backend.bind`: there is no decode
kernel with its own notion of visibility; each row has its own range.
Symptom:
Verification accepts and rejects by wrong logits: the target model has seen the answer.
Risk and impact:
Silent; speculation changes the model's answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket
from lockstep.types import INT32_MAX, GroupSpec

SOURCE = "flashinfer-ai/flashinfer#3871"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("verify-chain/dense",)
RELATED = ("sglang-26512", "sglang-10172")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Any) -> Any:
        handle = old(self, spec, bucket, views, variant)
        q_indptr = np.asarray(views.q_indptr)
        request = np.repeat(np.arange(bucket.requests), np.diff(q_indptr))
        cached_len = np.asarray(views.positions)[q_indptr[request]]
        if bucket.width < 2 or bucket.tail or not cached_len.all():
            return handle
        table = handle.table
        last = np.asarray(table.hi)[q_indptr[request + 1] - 1]
        pages = table._replace(start=np.full_like(last, INT32_MAX), hi=last)
        return replace(handle, table=pages)

    return bind
