"""The window was ignored after prefill.

Summary:
Prefill respected the sliding window; decoding did not.
Motivation:
The window was part of a bias object that the backend made for prefill. Decoding used the same bias
for local and global layers alike (known from the issue).
Mechanism:
1. Prefill builds a local-attention bias and is right.
2. Decode steps take a bias that has no window.
3. Every generated token attends to the whole history.
Key functions:
vLLM's xformers backend. Here `attention.base.window_begin` for requests of one row.
Symptom:
Quality drifts as the answer grows past the window; prompts alone look right.
Risk and impact:
Silent. Engines that also release pages before the window would read pages that belong to other
requests by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.step import Ints, StepPlan
from lockstep.types import GroupSpec

SOURCE = "vllm-project/vllm#23969"
TARGET = "lockstep.attention.base:window_begin"
CELLS = ("window-edges/window",)
RELATED = ("sglang-32087", "vllm-51756", "sglang-26513")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def window_begin(spec: GroupSpec, plan: StepPlan, hi: Ints) -> Any:
        lo = old(spec, plan, hi)
        if spec.window is None:
            return lo
        group: Any = next(g for g in plan.groups if g.spec == spec)
        return np.where(plan.new_lens[plan.request] == 1, group.first_pos[plan.request], lo)

    return window_begin
