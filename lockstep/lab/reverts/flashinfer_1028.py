"""A plain step still used the tree mask of the step before.

Summary:
A wrapper that had been planned with a custom mask kept it when it was planned again without one.
Motivation:
Speculative engines alternate: a verify step with a tree, then plain steps, on the same wrapper
object.
Mechanism:
1. plan(custom_mask=...) stores the mask in the wrapper.
2. plan() without a mask leaves the buffer as it is.
3. The kernel finds a mask and obeys it.
Key functions:
plan of FlashInfer's paged prefill wrapper. Here `attention.base.lists`: a tree is a list of slots
per row, and the lists belong to the
plan, which is frozen; the backend has no state that could outlive a step. The revert has to add
some.
Symptom:
Rows of a plain step look at the draft nodes of an earlier tree, and of other requests, instead of
their own keys.
Risk and impact:
Silent; needs the sequence "tree, then plain", which tests that build a fresh wrapper per case never
make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.image import PlanArrays
from lockstep.types import GroupSpec

SOURCE = "flashinfer-ai/flashinfer#1028"
TARGET = "lockstep.attention.base:lists"
CELLS = ("tree-accept/dense",)
RELATED = ("flashinfer-4014", "sglang-29616")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[Any, Any] = {}

    def lists(spec: GroupSpec, views: PlanArrays) -> Any:
        arrays = [np.array(a, np.int32) for a in old(spec, views)]
        if len(arrays[2]):
            kept[spec] = arrays
        elif spec in kept:
            rows = min(len(arrays[0]), len(kept[spec][0]))
            for mine, stale in zip(arrays[:2], kept[spec], strict=False):
                mine[:rows] = stale[:rows]
            beyond = np.zeros(
                int(views.positions.max()) + 1, np.int32
            )  # what the old lists do not name is the sink
            arrays[2] = np.concatenate((kept[spec][2], beyond))
        return tuple(arrays)

    return lists
