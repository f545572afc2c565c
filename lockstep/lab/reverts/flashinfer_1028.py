"""A plain step still used the tree mask of the previous step.

Summary:
A wrapper that had been planned with a custom mask kept it when it was planned again without one.
Motivation:
Speculative engines alternate on one wrapper object: a verify step with a tree, then plain steps.
Mechanism:
1. plan(custom_mask=...) stores the mask in the wrapper.
2. plan() without a mask leaves the buffer as it is.
3. The kernel finds a mask and applies it.
Key functions:
plan of FlashInfer's paged prefill wrapper. Here `attention.base.slot_lists`: a tree is a list of
slots per row, and the lists belong to the plan, which is frozen. The backend has no state that
could outlive a step, so the revert adds some.
Symptom:
Rows of a plain step attend to the draft nodes of an earlier tree, possibly of another request,
instead of their own keys.
Risk and impact:
Silent. It needs the sequence "tree, then plain", which tests that build a new wrapper per case
never produce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.image import PlanArrays
from lockstep.types import GroupSpec

SOURCE = "flashinfer-ai/flashinfer#1028"
TARGET = "lockstep.attention.base:slot_lists"
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
            )  # entries past the old lists point to slot 0
            arrays[2] = np.concatenate((kept[spec][2], beyond))
        return tuple(arrays)

    return lists
