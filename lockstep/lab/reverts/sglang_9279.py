"""In window layers the tree mask was read from the wrong column.

Summary:
A verify step masks its draft nodes with a matrix. For window layers the keys start at the window,
but the mask was still read from column 0.
Motivation:
The mask has one column per key of the whole request. Window layers drop keys at the front, so their
k-th key is not column k.
Mechanism:
1. With a prefix longer than the window, the layer's key list begins at prefix - w.
2. The kernel reads mask[row, k] for its k-th key, without adding that start.
3. It gets the columns of old prefix tokens, which are all visible: siblings of the node are not
   masked.
Key functions:
SGLang's Triton extend kernel with a custom mask. Here `attention.base.slot_lists`: there is no
mask, and a node lists its ancestors. The revert gives window layers the nodes in their flat order,
as if the tree were a chain.
Symptom:
Verification in window layers sees other branches; the acceptance rate falls, and the accepted
tokens differ from plain decoding.
Risk and impact:
Silent; only with trees, only beyond the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.image import PlanArrays
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#9279"
TARGET = "lockstep.attention.base:slot_lists"
CELLS = ("verify-tree/window",)
RELATED = ("sglang-24617", "sglang-26513")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def lists(spec: GroupSpec, views: PlanArrays) -> Any:
        start, tail_indptr, tail_slots = old(spec, views)
        if spec.window is None or not len(tail_slots):
            return start, tail_indptr, tail_slots
        starts, ends, q_indptr = (np.asarray(a) for a in (start, tail_indptr, views.q_indptr))
        lens = np.diff(ends)
        row = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
        request = np.repeat(np.arange(len(q_indptr) - 1), np.diff(q_indptr))
        back = (
            ends[row + 1] - 1 - np.arange(len(row), dtype=np.int32)
        )  # number of entries after this one in the row's list
        chain = np.asarray(views.write_slots)[np.maximum(row - back, q_indptr[request[row]])]
        own = np.asarray(tail_slots)[: len(row)]
        return start, tail_indptr, np.where(starts[row] > spec.window, chain, own)

    return lists
