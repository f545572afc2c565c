"""The soft cap never reached the plan, so capped models ran uncapped.

Summary:
Models that cap their scores with cap * tanh(score / cap) ran on FlashInfer without the cap.
Motivation:
The library chooses the capped kernel when a step is planned; the cap was passed only at run time.
Known from the open issue and from reading the code; other backends of that engine never read the
cap at all.
Mechanism:
1. begin_forward is called without logits_soft_cap, and a kernel without a cap is selected.
2. The value given at run time is not read.
Key functions:
All `begin_forward` calls of SGLang's FlashInfer backend. Here `attention.base.score_constants`. A
backend without soft caps states so in its Caps, and such a model is refused on it.
Symptom:
Models like Gemma-2 and Grok drift as soon as scores are large enough for the cap to bind; a cosine
of 0.59 is reported.
Risk and impact:
Silent, and hidden by small test values: a cap that does not bind changes nothing. The lab's feature
uses one that binds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.types import AttnSpec

SOURCE = "sgl-project/sglang#33915 (open issue), #34093"
TARGET = "lockstep.attention.base:score_constants"
CELLS = ("chunked/soft-cap",)
RELATED = ("sglang-31501", "flashinfer-787")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def score_constants(spec: AttnSpec) -> Any:
        return old(replace(spec, soft_cap=None))

    return score_constants
