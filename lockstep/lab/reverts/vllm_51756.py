"""Global layers lost old context by sharing a cache group with window layers.

Summary:
The window of a layer was taken from its cache group, not from the layer.
Motivation:
To save memory, layers of both kinds can be merged into groups of one page layout. The group then
has a window that some of its layers do not have.
Mechanism:
1. Groups are merged; the merged group has the window of some of its layers.
2. Attention takes the window of the group.
3. A global layer sees the last w keys only.
Key functions:
vLLM's KV cache groups (known from the issue). Here `attention.base.window_begin`; window and
causality are stored in one place, the GroupSpec, and a group is by definition the layers that share
them.
Symptom:
Long contexts forget their beginning. Everything shorter than the window is right.
Risk and impact:
Silent loss of quality at long context, easily mistaken for a weakness of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.plan.step import Ints, StepPlan
from lockstep.types import GroupSpec

SOURCE = "vllm-project/vllm#51756"
TARGET = "lockstep.attention.base:window_begin"
CELLS = ("chunked/window",)
RELATED = ("vllm-23969", "sglang-31501")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def window_begin(spec: GroupSpec, plan: StepPlan, hi: Ints) -> Any:
        windows = [g.spec.window for g in plan.groups if g.spec.window is not None]
        return old(replace(spec, window=min(windows)) if windows else spec, plan, hi)

    return window_begin
