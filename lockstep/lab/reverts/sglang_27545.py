"""Rows were assigned to requests by a fixed stride although requests had different numbers of rows.

Summary:
The row boundaries of a draft-extend step were computed as request * stride, with a stride that was
not the number of rows per request.
Motivation:
With top-k 1 the two numbers, num_steps + 1 and num_draft_tokens, are equal. With top-k > 1 they are
not.
Mechanism:
1. qo_indptr is an arithmetic sequence with the wrong step.
2. Rows are computed against the keys of a neighbour, or against no request's keys.
3. max_extend_len, too small as well, drops query blocks: their output is never written.
Key functions:
SGLang's Triton draft-extend metadata. Here `attention.cpu.blocks`, which cuts rows into blocks by
q_indptr alone.
Symptom:
NaN in the draft model, or rows that were computed for another request.
Risk and impact:
Silent where it is not NaN; content of one request enters another one's draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.plan.step import StepPlan, ints

SOURCE = "sgl-project/sglang#27545"
TARGET = "lockstep.attention.cpu:blocks"
BACKEND = "cpu"
CELLS = ("draft-extend/dense",)
RELATED = ("sglang-26651", "flashinfer-3871")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def blocks(plan: StepPlan, rows: int) -> Any:
        real, q_indptr = plan.real, plan.q_indptr.copy()
        if real.requests:
            q_indptr[: real.requests] = np.arange(real.requests) * (real.tokens // real.requests)
        return old(replace(plan, q_indptr=ints(q_indptr)), rows)

    return blocks
