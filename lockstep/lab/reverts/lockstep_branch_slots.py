"""The keys of two branches were mixed.

Summary:
Slots of a draft's tokens were given out branch by branch and read step by step. Each branch wrote
where another one looked.
Motivation:
A tensor of slots has two axes, branches and steps, and one of the two orders is as natural as the
other.
Mechanism:
1. A tree has several branches; every row gets a slot of its own.
2. Rows are written in one order of these slots and read in the other.
3. A node attends to keys of another branch, or to slots that nobody has written.
Key functions:
SGLang's out_cache_loc for FA3 with top-k above 1, viewed as [steps, bs * topk].T. Here
`plan.build.write_slots`: where a row is written is the last entry of its own list.
Symptom:
Branches disturb each other; upstream acceptance fell, and a verified path would have wrong bits.
Risk and impact:
Right for chains and for one branch, so every test without a tree passes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from lockstep.plan.build import BatchWork
from lockstep.types import GroupSpec

SOURCE = "class: written in one order of nodes, read in another"
TARGET = "lockstep.plan.build:write_slots"
CELLS = ("engine-tree/llama", "draft-decode/dense")
RELATED = ("sglang-7239", "sglang-27360")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def write_slots(spec: GroupSpec, work: BatchWork, rows: Any, group: tuple[Any, ...]) -> Any:
        slots, q_indptr = np.array(old(spec, work, rows, group)), work.shape.q_indptr
        for begin, end in pairwise(q_indptr):
            if rows.positions[begin] >= rows.start[begin]:
                slots[begin:end] = slots[begin:end][::-1]
        return slots

    return write_slots
