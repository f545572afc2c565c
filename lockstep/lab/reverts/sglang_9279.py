"""In window layers the tree mask was read from the wrong column on.

Summary:
A verify step masks its draft nodes with a matrix. For window layers the keys start at the window,
but the mask was still read from
column 0.
Motivation:
The mask has one column per key of the whole request. Window layers drop keys at the front, so their
k-th key is not column k.
Mechanism:
1. Prefix longer than the window: the layer's key list begins at prefix - w.
2. The kernel reads mask[row, k] for its k-th key, without adding that start.
3. It gets the columns of old prefix tokens, which are all visible: siblings of the node are not
   masked.
Key functions:
SGLang's Triton extend kernel with a custom mask. Here `attention.cpu.lists`: there is no mask, a
node names its ancestors. The revert
gives window layers the nodes in their flat order, as if the tree were a chain.
Symptom:
Verification in window layers sees other branches; acceptance falls, and the accepted tokens are no
longer what plain decoding gives.
Risk and impact:
Silent; only with trees, only beyond the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.image import Views
from lockstep.plan.step import Group, PagedGroup, StepPlan

SOURCE = "sgl-project/sglang#9279"
TARGET = "lockstep.attention.cpu:lists"
CELLS = ("verify-tree/window",)
RELATED = ("sglang-24617", "sglang-26513")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def lists(plan: StepPlan, group: Group, views: Views) -> Any:
        start, tail_indptr, tail_slots = old(plan, group, views)
        if group.spec.window is None or not isinstance(group, PagedGroup):
            return start, tail_indptr, tail_slots
        lens = np.diff(plan.tail_indptr)
        row = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
        back = (
            plan.tail_indptr[row + 1] - 1 - np.arange(len(row), dtype=np.int32)
        )  # entries behind this one in the row's list
        chain = group.write_slots[np.maximum(row - back, plan.q_indptr[plan.request[row]])]
        return (
            start,
            tail_indptr,
            np.where(plan.start[row] > group.spec.window, chain, group.tail_slots[: len(row)]),
        )

    return lists
