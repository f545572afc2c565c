"""A cache hit moved the split boundaries.

Summary:
Splits were counted from the end of the cached prefix instead of from position 0, so a request that
hit the cache added up its keys in a different order from one that did not.
Motivation:
Fixed split sizes make a kernel independent of the batch. They do not make it independent of where
the counting starts.
Mechanism:
1. Cold: keys [0, n) are cut at multiples of the split size.
2. Warm, with a prefix of m: [0, m) and [m, n) are cut separately.
3. Unless m is a multiple of the split size, the sums differ in their last bits, and a near-tie of a
   greedy choice goes the other way.
Key functions:
SGLang's answer was to turn the radix cache off for FlashInfer in deterministic mode. Here
`attention.cpu.Backend.bind`: splits are aligned to absolute position 0, so a prefix changes
nothing.
Symptom:
The same prompt gives a different greedy answer the second time.
Risk and impact:
Values are right, but not reproducible. The lab counts hits, so that "equal" cannot mean "never
hit".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep import order
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#10721 (gate), #34683 (issue)"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("fork/dense", "extend-prefix/dense")
RELATED = ("sglang-26412", "vllm-51902")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Any) -> Any:
        handle = old(self, spec, bucket, views, variant)
        q_indptr = np.asarray(views.q_indptr)
        first = q_indptr[:-1][np.diff(q_indptr) > 0]
        prefix = int(np.asarray(views.positions)[first].max(initial=0))
        tile = order.tile_len(spec.d_qk, spec.d_v)
        return replace(handle, split=max(tile, prefix // tile * tile)) if prefix else handle

    return bind
