"""A dequantised cache was scaled a second time.

Summary:
A fallback that widens an FP8 cache before attention multiplies by the scales; attention then
applied them again.
Motivation:
Which side applies the scale differed between the two paths (known from the issue).
Mechanism:
1. The kernel cannot read FP8, so the cache is dequantised: stored * scale.
2. The ordinary call follows, with k_scale and v_scale as arguments.
3. Scores and outputs carry the scale squared.
Key functions:
A fallback path of vLLM. Here `kv.pool.Pool.keys`, which returns the storage as it is; loading is an
exact cast, and only `attention.base` applies scales.
Symptom:
Wrong by the scale, on the fallback path only.
Risk and impact:
Silent; depends on which kernels the machine has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.kv.pool import Keys

SOURCE = "vllm-project/vllm#48016"
TARGET = "lockstep.kv.pool:Pool.keys"
CELLS = ("chunked/fp8-kv",)
RELATED = ("sglang-28144", "flashinfer-1254")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def keys(self: Any, layer: int) -> Any:
        k, v = old(self, layer)
        if k.dtype is not torch.float8_e4m3fn:
            return Keys(k, v)
        attn = self.spec.layers[layer]
        return Keys(k.float() * attn.k_scale, v.float() * attn.v_scale)

    return keys
