"""The window was cut per request, not per row.

Summary:
A paged prefill trims the key list of a request to the last window + new keys. That bounds what the
batch reads, but within the list every row saw everything up to itself: only the first row had its
window.
Motivation:
FlashInfer chooses the windowed kernel when a step is planned. The window was passed at run time,
where it has no effect.
Mechanism:
1. The plan is made without a window.
2. The trim keeps keys from first row - w on, which is right for the first row and too much for all
   later rows.
3. run(window_left=w) is ignored by a kernel that was compiled without windows.
Key functions:
The `begin_forward` calls of SGLang's FlashInfer prefill updater. Here
`attention.base.window_begin`, one number per row.
Symptom:
Extends longer than the window + 1 attend outside it on the paged-only path; short ones are right.
Risk and impact:
Silent; deterministic mode, which uses the paged path only, was hit the most. Fixed seven weeks
after #26513, which had seemed complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.plan.step import Ints, StepPlan
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#31501"
TARGET = "lockstep.attention.base:window_begin"
CELLS = ("chunked/window",)
RELATED = ("sglang-26513", "sglang-33915")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def window_begin(spec: GroupSpec, plan: StepPlan, hi: Ints) -> Any:
        return old(spec, plan, hi)[plan.q_indptr[plan.request]]

    return window_begin
