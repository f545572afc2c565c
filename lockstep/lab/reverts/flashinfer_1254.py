"""The scales of an FP8 cache were passed as the wrong arguments and ignored.

Summary:
FlashInfer's paged prefill ignored the K and V scales when the LSE was requested as well.
Motivation:
k_scale and v_scale were passed by position into a catch-all `*args` of a function that expected
them by name.
Mechanism:
1. run(..., return_lse) forwards its scales by position.
2. They become extra arguments that are never read; the named parameters keep their default, no
   scale.
3. Scores and outputs are computed from the stored numbers.
Key functions:
run of BatchPrefillWithPagedKVCacheWrapper. Here `attention.base.score_constants`, from which every
backend gets the score factor made of the layer's softmax scale and its keys' scale.
Symptom:
Wrong by the scale in K (upstream in V too), only with an FP8 cache whose scales are not 1, and only
with LSE.
Risk and impact:
Silent: most checkpoints have scales of 1, and the call without LSE was right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.types import AttnSpec

SOURCE = "flashinfer-ai/flashinfer#1254"
TARGET = "lockstep.attention.base:score_constants"
CELLS = ("chunked/fp8-kv",)
RELATED = ("sglang-34217", "sglang-28144", "vllm-48016")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def score_constants(spec: AttnSpec) -> Any:
        return old(replace(spec, k_scale=1.0))

    return score_constants
