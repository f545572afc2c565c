"""A tree was verified in the window layers with slots of the full layers' pool.

Summary:
Full and window layers keep their keys in separate pools. The table of draft nodes was made of
full-pool slots and not translated for the window layers.
Motivation:
Every token has two addresses. A table that is built once and used for both kinds of layers needs a
translation, wherever such a table is made.
Mechanism:
1. Verifying a tree with top-k > 1 expands a table of one slot per visible node.
2. The plain page table is translated to window slots; the expanded one is not.
3. Window layers read whatever is at that index of their pool.
Key functions:
The verify metadata of SGLang's FlashAttention backend. Here `attention.base.slot_lists`;
`plan.build.tail_slots` makes a list per group from that group's own pages, and ids of different
groups are unrelated.
Symptom:
Wrong tokens on models with windows; right as long as both pools happen to be laid out alike. The
lab shuffles each pool independently.
Risk and impact:
Silent; reads keys of other requests. #20369, #24395, #27491 and #33517 are similar: the class is
large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.plan.image import PlanArrays
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#24617"
TARGET = "lockstep.attention.base:slot_lists"
CELLS = ("verify-tree/window-sinks",)
RELATED = ("sglang-24395", "sglang-19107", "sglang-9279")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    full: list[Any] = []  # the lists of the step's first group

    def lists(spec: GroupSpec, views: PlanArrays) -> Any:
        start, tail_indptr, tail_slots = old(spec, views)
        if spec.window is None:
            full[:] = [tail_slots]
        same = full and len(full[0]) == len(tail_slots)
        return start, tail_indptr, full[0] if same else tail_slots

    return lists
