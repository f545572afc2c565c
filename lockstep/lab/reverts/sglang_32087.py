"""Decoding saw one key fewer than prefill did.

Summary:
SGLang counts a window as a radius: w + 1 keys, the row included. Triton's decode trimmed a request
to min(length, w) keys.
Motivation:
"Window" means either the keys seen or the keys seen besides the row's own. The conversion was made
in prefill and not in decode.
Mechanism:
1. Decoding trims the key list to the last min(seq_len, w).
2. The oldest key of the window is missing.
3. Prefill of the same position sees it.
Key functions:
update_sliding_window_buffer of the Triton backend. Here `attention.base.window_begin` for requests
of one row; `window = w` means w keys, the row itself included, everywhere.
Symptom:
A small error beyond the window, in decode only; a spike at the oldest key shows it. The fix was
closed unmerged when we read it, and upstream's test reference had been changed to match the bug:
never change the reference to fit a backend.
Risk and impact:
Silent; every generated token past the window is slightly wrong, and prefill and decode disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.step import Ints, StepPlan
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#32087 (closed unmerged)"
TARGET = "lockstep.attention.base:window_begin"
CELLS = ("window-edges/window",)
RELATED = ("hf-29623", "vllm-23969", "hf-37574")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def window_begin(spec: GroupSpec, plan: StepPlan, hi: Ints) -> Any:
        lo = old(spec, plan, hi)
        if spec.window is None:
            return lo
        short = (plan.new_lens[plan.request] == 1) & (hi >= spec.window)
        return np.where(short, hi - np.int32(spec.window - 1), lo)

    return window_begin
