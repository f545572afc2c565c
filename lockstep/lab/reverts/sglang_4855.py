"""A page table was filled with slots instead of pages.

Summary:
For graph replay the page table was rebuilt from token slots, and the division by the page size was
forgotten.
Motivation:
The table is made in two places, eagerly and for replay. The eager one divided.
Mechanism:
1. Every page_size-th slot of a request is taken: the first slot of each of its pages.
2. Without `// page_size` these are slots, not page ids.
3. The kernel multiplies by the page size again and reads at wrong addresses. (The table was also a
   new tensor instead of being filled in place.)
Key functions:
Graph replay of SGLang's FlashAttention backend. Here `attention.base.addresses`, for decode steps;
Lockstep makes a table in one place, for eager, capture and replay alike.
Symptom:
Decoding with pages larger than 1 under graphs is wrong; pages of 1 and eager runs are right.
Risk and impact:
Silent reads of other requests' keys, or outside the pool. Here the entries wrap around so that they
stay inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.image import PlanArrays
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#4855"
TARGET = "lockstep.attention.base:addresses"
CELLS = ("fork/dense",)
RELATED = ("sglang-8685", "sglang-15469")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def addresses(spec: GroupSpec, views: PlanArrays) -> Any:
        page_ids, page_indptr, first_pos, size = old(spec, views)
        slots = np.asarray(page_ids) * np.int32(size)
        decodes = len(views.positions) == len(views.first_pos)  # one row per request
        if decodes and len(slots):
            page_ids = slots % np.int32(np.asarray(page_ids).max() + 1)
        return page_ids, page_indptr, first_pos, size

    return addresses
