"""The keys of two draft branches were mixed.

Summary:
The slots of draft tokens were allocated branch by branch and read step by step, so each branch
wrote where another branch read.
Motivation:
A tensor of slots has two axes, branches and steps, and either order looks natural.
Mechanism:
1. A tree has several branches; every row gets its own slot.
2. Rows are written in one order of these slots and read in the other.
3. A node attends to keys of another branch, or to slots that were never written.
Key functions:
SGLang's out_cache_loc for FA3 with top-k above 1, viewed as [steps, bs * topk].T. Here
`plan.build.write_slots`: a row is written to the last entry of its own list.
Symptom:
Branches corrupt each other. Upstream the acceptance rate fell; here a verified path would have
wrong bits.
Risk and impact:
Chains and single branches are right, so every test without a tree passes.
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
