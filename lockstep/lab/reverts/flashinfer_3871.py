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
plan of BatchDecodeWithPagedKVCacheWrapper. Here `attention.cpu.Backend.bind`: there is no decode
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
