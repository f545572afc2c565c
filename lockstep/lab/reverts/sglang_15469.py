"""A branch that crossed a page was assumed to continue in the next page of the pool.

Summary:
The pages of a draft branch were computed from its slots by arithmetic that is valid only while the
branch stays within one page.
Motivation:
Slots of one branch look contiguous, because the allocator hands out whole pages and small tests get
adjacent ones.
Mechanism:
1. (slot - last_page_len) // page_size is taken over strided columns and used as the list of pages.
2. When a branch crosses a page, the next page can be anywhere in the pool.
3. The computed page is a different one, possibly outside the pool.
Key functions:
Draft metadata of SGLang's FlashAttention backend for top-k > 1 and pages > 1. Here
`plan.build.node_slots`, which goes through the request's scratch pages by the one address formula.
Symptom:
Illegal access, or keys of other requests, as soon as steps cross a page. With pages of 16 and ten
nodes nothing happens; pages of 1 show it.
Risk and impact:
Silent until it crashes. The revert lays out nodes from the lowest scratch page on, which keeps them
inside the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.build import RequestPages
from lockstep.plan.step import Ints
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#15469"
TARGET = "lockstep.plan.build:node_slots"
CELLS = ("verify-tree/dense",)
RELATED = ("sglang-7239", "sglang-27360", "sglang-4855")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def node_slots(spec: GroupSpec, pages: RequestPages, nodes: Ints) -> Any:
        return np.asarray(pages.scratch.min() * spec.page_size + nodes, np.int32)

    return node_slots
