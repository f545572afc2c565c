"""The room for draft key lists of latent attention ignored the number of branches.

Summary:
The error of the dense backend (`sglang-27338`) in the latent one, where it was found later: the
buffer has one row per request, not one per branch.
Motivation:
A fix is made where the report points; similar code next to it looks different enough to be missed.
Mechanism:
1. A request needs branches * length entries; its row has length entries.
2. The lists of later branches overflow the row.
3. Entries that do not fit are cut: these branches read slot 0.
Key functions:
The draft graph buffers (kv_indices) of SGLang's FlashInfer MLA backend. Here
`plan.build.tail_slots`, one function for every layout; the revert breaks it for latent groups only.
Symptom:
Drafts of a latent model use wrong keys; later NaN or an illegal access.
Risk and impact:
Memory corruption in a captured buffer, for one family of models.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from lockstep.plan.build import BatchWork
from lockstep.types import GroupSpec, Layout

SOURCE = "sgl-project/sglang#27460"
TARGET = "lockstep.plan.build:tail_slots"
CELLS = ("draft-decode/latent",)
RELATED = ("sglang-27338", "sglang-27360")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def tail_slots(spec: GroupSpec, g: int, work: BatchWork, rows: Any) -> Any:
        slots, q_indptr = old(spec, g, work, rows), work.shape.q_indptr
        for begin, end in pairwise(q_indptr):
            if spec.layout is Layout.LATENT and end > begin:
                first = work.shape.tail_indptr[begin + 1]
                slots[first : work.shape.tail_indptr[end]] = 0
        return slots

    return tail_slots
