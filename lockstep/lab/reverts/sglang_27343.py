"""Pad rows had no request of their own.

Summary:
An embedding step was padded to a captured size, but the row boundaries ended with the real rows.
Motivation:
The fast path of embedding models takes boundaries for keys and queries from one array. Piecewise
graphs pad tokens, not requests.
Mechanism:
1. The batch is padded from n to bucket tokens.
2. The boundaries still end at n, so the rows after n belong to no request.
3. The kernel has to assign them to a request: the last request no longer ends where it did.
Key functions:
fa_skip_kv_cache under piecewise graphs in SGLang. Here `plan.bucket.pad`, which appends ordinary
requests so that the boundaries cover every row; in the revert the pad rows become part of the last
real request.
Symptom:
Upstream: NaN in the embedding of the last token. Here: an encoder's last request sees pad rows as
keys, in padded steps only.
Risk and impact:
It depends on how far the batch is from a captured size, hence on the load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.plan.step import Bucket, StepPlan, ints

SOURCE = "sgl-project/sglang#27343"
TARGET = "lockstep.plan.bucket:pad"
CELLS = ("embed/encoder",)
RELATED = ("sglang-24097", "trtllm-6136", "vllm-43810")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def pad(plan: StepPlan, bucket: Bucket) -> Any:
        padded = old(plan, bucket)
        q_indptr = padded.q_indptr.copy()
        q_indptr[max(1, plan.real.requests) :] = bucket.tokens
        return replace(padded, q_indptr=ints(q_indptr))

    return pad
