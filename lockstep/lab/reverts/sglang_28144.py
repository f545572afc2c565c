"""The scale of V was never applied.

Summary:
With an FP8 cache, the second product's scale was fixed at 1.0, so outputs were computed from the
stored numbers, not from V.
Motivation:
Scales of K, of V and of the query are folded into two numbers before the call. One of the two was a
constant.
Mechanism:
1. The cache holds v / v_scale in FP8.
2. The call passes bmm2_scale = 1.0.
3. The output is too small or too large by v_scale. (The query was also cast to FP8 without a scale,
   and k_scale was applied even to caches that are not FP8.)
Key functions:
SGLang's trtllm_mha backend. Here `attention.base.value_scale`, applied once, after the division.
Symptom:
Accuracy loss with checkpoints that carry real scales; with scales of 1 nothing.
Risk and impact:
Silent: the defaults hide it. All cached features of the lab have scales that are not 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.types import AttnSpec

SOURCE = "sgl-project/sglang#28144"
TARGET = "lockstep.attention.base:value_scale"
CELLS = ("chunked/fp8-kv",)
RELATED = ("flashinfer-1254", "vllm-48016")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def value_scale(spec: AttnSpec) -> Any:
        return 1.0

    return value_scale
