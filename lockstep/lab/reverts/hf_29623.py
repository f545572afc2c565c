"""The window was one key too wide in one implementation and not in the other.

Summary:
Two attention implementations of one model disagreed on whether the window includes the token
itself.
Motivation:
FlashAttention takes the number of keys to the left, excluding the row itself; the eager mask
counted the row. Both got the same configuration value (known from the issues; it came back later in
other models).
Mechanism:
1. sliding_window = w is read from the configuration.
2. One path masks keys at or below p - w; the other passes w as the left size and so keeps the key
   at p - w.
3. Beyond the window, rows of the two paths see w and w + 1 keys.
Key functions:
transformers' sliding-window masks. Here `attention.base.window_begin`; configuration values are
converted once, at load.
Symptom:
Switching the implementation changes the text, beyond the window only.
Risk and impact:
Silent; a model trained with one meaning is served with the other. The lab tests lengths of w - 1, w
and w + 1 for this reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.step import Ints, StepPlan
from lockstep.types import GroupSpec

SOURCE = "huggingface/transformers#29623, again #39408 and #40163"
TARGET = "lockstep.attention.base:window_begin"
CELLS = ("window-edges/window",)
RELATED = ("sglang-32087", "hf-37574")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def window_begin(spec: GroupSpec, plan: StepPlan, hi: Ints) -> Any:
        lo = old(spec, plan, hi)
        if spec.window is None:
            return lo
        group: Any = next(g for g in plan.groups if g.spec == spec)
        return np.maximum(lo - np.int32(1), group.first_pos[plan.request])

    return window_begin
