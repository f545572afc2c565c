"""A tree's key count was taken from its last row.

Summary:
kv_len is one more than the largest position of a request's rows. It was computed from the last row,
which is correct only for a chain.
Motivation:
In a chain the last row is the deepest. Trees are usually numbered level by level, so there it is
mostly true as well.
Mechanism:
1. A tree is numbered in the order in which its nodes were proposed; the last node is a child of the
   root.
2. kv_len becomes cached_len + 2 although a path of five nodes is computed.
3. Everything sized by kv_len is too short: live pages, a backend's extents, the length of the next
   step.
Key functions:
`plan.build.kv_lens`, which takes the maximum over a request's rows.
Symptom:
None with level order. With any other numbering, deep nodes are past the end of the keys that the
plan declares.
Risk and impact:
A backend that trusts kv_len drops the keys of the deepest draft tokens. Every tree of the lab ended
with its deepest node, so no cell showed it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.build import BatchWork
from lockstep.types import GroupSpec, Layout

SOURCE = "class: a length taken from the last row"
TARGET = "lockstep.plan.build:kv_lens"
CELLS = ("verify-tree/dense", "verify-tree/window")
RELATED = ("sglang-26512", "sglang-27545")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def kv_lens(spec: GroupSpec, work: BatchWork, rows: Any) -> Any:
        if spec.layout is Layout.CROSS or not work:
            return old(spec, work, rows)
        return np.asarray(rows.positions[work.shape.q_indptr[1:] - 1] + 1, np.int32)

    return kv_lens
