"""With a cached prefix, the scales of the FP8 cache were dropped.

Summary:
An extend step with a prefix makes two calls. The one over the cached keys got no K and V scales.
Motivation:
The step is computed in two parts and merged. A parameter has to be passed twice, and was passed
once.
Mechanism:
1. The call over the new keys reads them unquantised and needs no scales.
2. Cached keys are FP8; the paged call gets neither k_scale nor v_scale and uses the stored numbers.
3. The merge combines a wrong part with a right one.
Key functions:
forward_extend of SGLang's FlashInfer backend. Here the lowering of a step with a prefix,
`attention.cpu.Backend.bind`: there is one pass over all keys, new keys are read back from the cache
like old ones, and scales are constants of the layer.
Symptom:
Right when cold, wrong by the scale when warm.
Risk and impact:
Silent; appears with the first cache hit of a quantised model whose scales are not 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.attention import cpu
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#34217"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("chunked/fp8-kv",)
RELATED = ("flashinfer-1254", "sglang-26513")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Any) -> Any:
        handle = old(self, spec, bucket, views, variant)
        if not views.positions[views.q_indptr[:-1].long()].any():  # no request has a prefix
            return handle
        bare = {
            attn: cpu.constants(replace(attn, k_scale=1.0, v_scale=1.0), spec.heads)
            for attn in spec.layers
        }
        return replace(handle, layers=bare)

    return bind
