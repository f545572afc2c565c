"""A buffer at a fixed address was not refreshed.

Summary:
A captured step reads its plan from buffers whose addresses it knows. New values went elsewhere, and
the buffers kept those of an earlier
step of the same shape.
Motivation:
Assigning a fresh tensor looks like updating the old one; eagerly it is.
Mechanism:
1. A step of some shape is prepared; its arrays lie at their fixed places.
2. The next step has the same shape. Its arrays are made, but what is read are the old places.
3. Rows stand where the rows of the earlier step stood.
Key functions:
FlashMLA metadata under full graphs in vLLM. Here `plan.image.write`, which fills the whole
image for every step; the revert
keeps the positions of the first step of each shape.
Symptom:
Upstream: right for some fifty tokens, then garbage, when a boundary was crossed that the old
metadata did not have. Here a decode step
turns its keys by the position of an earlier one.
Risk and impact:
The first tokens are fine, so a glance at the output is not enough.
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
