"""A buffer at a fixed address was not refreshed.

Summary:
A captured step reads its plan from buffers at fixed addresses. New values were put elsewhere, and
the buffers kept those of an earlier step of the same shape.
Motivation:
Assigning a new tensor looks like updating the old one; in eager mode it has the same effect.
Mechanism:
1. A step of some shape is prepared; its arrays are at their fixed places.
2. The next step has the same shape. Its arrays are made, but the launch reads the old places.
3. Rows have the positions of the earlier step's rows.
Key functions:
FlashMLA metadata under full graphs in vLLM. Here `plan.image.write`, which fills the whole image
for every step; the revert keeps the positions of the first step of each shape.
Symptom:
Upstream: right for some fifty tokens, then garbage, after crossing a boundary that the old metadata
did not have. Here a decode step applies the rotary embedding of an earlier position.
Risk and impact:
The first tokens are right, so a glance at the output is not enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.plan.image import ImageLayout
from lockstep.plan.step import StepPlan

SOURCE = "vllm-project/vllm#35175"
TARGET = "lockstep.plan.image:write"
CELLS = ("engine-batch/llama", "engine-page/qwen3")
RELATED = ("sglang-29616", "flashinfer-1028", "flashinfer-4014")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[Any, Any] = {}

    def write(image: Any, layout: ImageLayout, plan: StepPlan, ids: Any) -> Any:
        views = old(image, layout, plan, ids)
        first = kept.setdefault(layout, views[0].positions.copy())
        views[0].positions[:] = first
        return views

    return write
