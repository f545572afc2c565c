"""Page tables were read with the wrong page size.

Summary:
An argument that was passed by position became a different parameter of the kernel, which used it as
its page size.
Motivation:
In long positional argument lists of integers, any permutation type-checks.
Mechanism:
1. The table of a request has one entry per page of its own size.
2. The kernel divides positions by another page size, and looks up other entries.
3. It also multiplies page ids by that size, and finds other slots.
Key functions:
The CUTLASS and TRT-LLM MLA calls of SGLang. Here `attention.base.addresses`, which passes a group's
table and its page size to a backend together; the lab's window feature has groups with pages of two
sizes.
Symptom:
Right for requests of one page; wrong keys beyond that.
Risk and impact:
Silent reads of other requests' keys, or past the table's end. Keyword arguments would have
prevented it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.image import PlanArrays
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#8685"
TARGET = "lockstep.attention.base:addresses"
CELLS = ("chunked/window",)
RELATED = ("sglang-4855", "sglang-24395")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    first: list[int] = []  # the page size of the model's first group

    def addresses(spec: GroupSpec, views: PlanArrays) -> Any:
        page_ids, page_indptr, first_pos, size = old(spec, views)
        if spec.window is None:
            first[:] = [size]
        other = min(size, *first) if first else size
        behind = np.resize(
            np.asarray(page_ids), len(page_ids) * size // other
        )  # the table is extended, so that reads stay inside it
        return behind, page_indptr, first_pos, other

    return addresses
