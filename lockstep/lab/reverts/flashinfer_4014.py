"""The second layer was computed with the scale of the first.

Summary:
A cache of prepared kernels was keyed by shapes and dtypes. The softmax scale, which is part of a
prepared kernel, was not in the key.
Motivation:
Most models have one scale, so one entry per shape looked sufficient.
Mechanism:
1. The first call builds and stores a graph that contains its own scale.
2. A second call with the same shapes but another scale finds that entry.
3. It runs with the first call's scale.
Key functions:
A graph cache of FlashInfer. Here `attention.base.score_constants`; backends cache its results per
AttnSpec, which is all that they depend on. For this reason every feature of the lab has two layers
with different scales.
Symptom:
The first layer is right; the other layers are wrong by the ratio of the scales. Which layer is
"first" depends on the order of calls.
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
