"""With a cached prefix, the sliding window was applied to neither half of the attention.

Summary:
FlashInfer's extend step with a prefix runs in two parts, new keys (ragged) and cached keys (paged),
merged by LSE. Neither part got the window, so a row saw keys that are before its window.
Motivation:
Prefix caching and chunked prefill are the normal way to serve. On models with sliding windows every
request that hit the cache got different numbers from one that did not: about 0.2 in a module test
against a plain reference, and wrong tokens in serving.
Mechanism:
1. A request arrives with `cached_len` keys in the cache and extends by some rows.
2. The ragged call attends to the new keys, causally, without a window.
3. The paged call attends to the cached keys without any mask; before the fix its extent even
   included positions not yet written.
4. Both are merged: a row at p sees everything below p instead of its last w keys.
Key functions:
forward_extend (both calls of forward_return_lse), update_sliding_window, and the new
_build_swa_prefix_custom_mask. Here `attention.base.window_begin`, which gives the first visible
position of every row, whether its keys are cached or new.
Symptom:
Wrong values as soon as prefix + row exceeds the window; cold and warm runs disagree. Tests whose
lengths stay inside the window pass. The reports differ on details: the merged mask is uint8, not
bool, and a window passed at run time to a kernel chosen at plan time has no effect. The paged plan
got its window in #31501; the ragged plan had none when we read it (#33915).
Risk and impact:
High: silent wrong tokens on common models with default features. In Lockstep a row addresses its
keys by position in one pass, so there is no second half that could be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.step import Ints, StepPlan
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#26513"
TARGET = "lockstep.attention.base:window_begin"
CELLS = ("extend-prefix/window", "window-edges/window")
RELATED = ("sglang-31501", "sglang-34217", "vllm-23969")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def window_begin(spec: GroupSpec, plan: StepPlan, hi: Ints) -> Any:
        lo = old(spec, plan, hi)
        if spec.window is None:
            return lo
        group: Any = next(g for g in plan.groups if g.spec == spec)
        cached_len = plan.positions[plan.q_indptr[plan.request]]
        return np.where(
            cached_len > 0, group.first_pos[plan.request], lo
        )  # as far back as the request still holds pages

    return window_begin
