"""A cache hit moved the split boundaries.

Summary:
Splits were counted from the end of the cached prefix instead of from position 0, so a request that
hit the cache added up its keys in
another order than one that did not.
Motivation:
Fixed split sizes make a kernel independent of the batch. They do not make it independent of where
the counting starts.
Mechanism:
1. Cold: keys [0, n) are cut at multiples of the split size.
2. Warm, prefix m: [0, m) and [m, n) are cut separately.
3. Unless m is a multiple, the sums differ in their last bits, and a greedy tie breaks the other
   way.
Key functions:
SGLang's answer was to turn the radix cache off for FlashInfer in deterministic mode. Here
`attention.cpu.split_for`: splits are aligned to
absolute position 0, so a prefix changes nothing.
Symptom:
The same prompt gives another greedy answer the second time.
Risk and impact:
Values are right, reproducibility is gone. The lab counts hits, so that "equal" cannot mean "never
hit".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep import order
from lockstep.plan.step import Group, StepPlan

SOURCE = "sgl-project/sglang#10721 (gate), #34683 (issue)"
TARGET = "lockstep.attention.cpu:split_for"
CELLS = ("fork/dense", "extend-prefix/dense")
RELATED = ("sglang-26412", "vllm-51902")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def split_for(plan: StepPlan, group: Group) -> Any:
        prefix = int(plan.positions[plan.q_indptr[plan.request]].max(initial=0))
        tile = order.tile_len(group.spec.d_qk, group.spec.d_v)
        return max(tile, prefix // tile * tile) if prefix else old(plan, group)

    return split_for
