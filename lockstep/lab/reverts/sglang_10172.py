"""Encoders ran causally.

Summary:
In some backends of SGLang, attention that should see every key of a request in both directions was
masked causally.
Motivation:
Each backend decided causality by itself, from the kind of layer. Some of these tests did not cover
cross attention and encoder-only layers.
Mechanism:
1. A layer of an encoder asks for attention.
2. The backend's test covers decoder layers and falls back to "causal".
3. Every row sees only itself and the rows before it.
Key functions:
The causality tests in SGLang's FlashAttention and Triton backends. Here `attention.base.visible`,
which reads `GroupSpec.causal`; every backend but the reference gets its ranges from it.
Symptom:
Embeddings of all tokens but the last are wrong; pooled vectors look plausible.
Risk and impact:
Silent loss of quality that differs by backend. The only sign was that two backends disagreed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.step import FreshGroup, Group, StepPlan

SOURCE = "sgl-project/sglang#10172"
TARGET = "lockstep.attention.base:visible"
CELLS = ("embed/encoder", "encode-decode/cross")
RELATED = ("flashinfer-3717", "flashinfer-3871", "sglang-24097")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def visible(plan: StepPlan, group: Group) -> Any:
        lo, hi = old(plan, group)
        return lo, np.minimum(hi, plan.positions + np.int32(1)) if isinstance(
            group, FreshGroup
        ) else hi

    return visible
