"""The room for draft key lists was computed without the number of branches.

Summary:
The buffer for the key lists of draft branches had one row per request, not one per branch.
Motivation:
The width was right for top-k 1, and sequences in tests are short enough to fit anyway.
Mechanism:
1. A request needs branches * length entries; its row has length entries.
2. Long sequences with several branches overflow their row.
3. The next request's entries begin inside this request's entries: one of the two is overwritten.
Key functions:
The draft graph buffers (kv_indices) of SGLang's FlashInfer backend; MLA had the same error
(#27460). Here `plan.build.tail_slots`: its capacity is rows * longest list, part of the bucket, and
checked.
Symptom:
Drafts use keys of another request; later NaN or an illegal access.
Risk and impact:
Memory corruption in a captured buffer. Upstream's own toggle for this fix no longer matched its
code when we looked: reverts go stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.build import BatchWork
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#27338"
TARGET = "lockstep.plan.build:tail_slots"
CELLS = ("draft-decode/dense",)
RELATED = ("sglang-27360", "sglang-7239")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def tail_slots(spec: GroupSpec, g: int, work: BatchWork, rows: Any) -> Any:
        slots, shape = old(spec, g, work, rows), work.shape
        narrow, begins = np.zeros_like(slots), shape.tail_indptr[shape.q_indptr]
        for i in range(len(work)):
            mine = slots[begins[i] : begins[i + 1]]
            narrow[i * shape.tail : i * shape.tail + len(mine)] = mine
        return narrow

    return tail_slots
