"""The scales of an FP8 cache went into the wrong arguments and were ignored.

Summary:
Asked for the LSE as well, the paged prefill of FlashInfer ignored the K and V scales.
Motivation:
k_scale and v_scale were passed on by position into a catch-all `*args` of a function that expected
them by name.
Mechanism:
1. run(..., return_lse) forwards its scales positionally.
2. They end up among extra arguments nobody reads; the named parameters keep their default, no
   scale.
3. Scores and outputs are computed on the stored numbers.
Key functions:
BatchPrefillWithPagedKVCacheWrapper's run. Here `attention.base.score_constants`, where every
backend gets what a layer's scale and that of its keys make of a score.
Symptom:
Wrong by the scale in K (upstream in V too), only with an FP8 cache whose scales are not 1, only
with LSE.
Risk and impact:
Silent: most checkpoints carry scales of 1, and the call without LSE was right.
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
