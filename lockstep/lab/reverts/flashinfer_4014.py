"""The second layer was computed with the scale of the first.

Summary:
A cache of prepared kernels was keyed by shapes and dtypes. The softmax scale, part of what was
prepared, was not in the key.
Motivation:
Most models have one scale, so one entry per shape looked sufficient.
Mechanism:
1. The first call builds and stores a graph with its own scale inside.
2. A second call of the same shapes but another scale finds that entry.
3. It runs with the first call's scale.
Key functions:
A graph cache of FlashInfer. Here `attention.base.score_constants`; backends keep its results per
AttnSpec, which is the whole of what they depend on. Every feature of the lab has two layers with
different scales, for this reason.
Symptom:
The first layer is right, the others are wrong by the ratio of the scales; which one is "first"
depends on the order of calls.
Risk and impact:
Silent; affects models with per-layer scales, and two models in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.types import AttnSpec

SOURCE = "flashinfer-ai/flashinfer#4014"
TARGET = "lockstep.attention.base:score_constants"
CELLS = ("chunked/dense",)
RELATED = ("flashinfer-1028",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[bool, Any] = {}

    def score_constants(spec: AttnSpec) -> Any:
        return kept.setdefault(spec.soft_cap is None, old(spec))

    return score_constants
