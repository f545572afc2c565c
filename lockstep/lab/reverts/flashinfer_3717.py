"""The last tile was not masked at the end of the keys.

Summary:
Non-causal attention did not mask the keys of its last tile that are past the request's end.
Motivation:
Causal kernels mask the last tile anyway, by the diagonal. Without causality no other mask does it.
Mechanism:
1. Keys are read in whole tiles; a length that is no multiple of the tile leaves a partial tile.
2. Without a mask, the positions past the end take part in the softmax.
3. If they contain zeros, the denominator grows and the output shrinks; if they contain a
   neighbour's keys, those are mixed in.
Key functions:
FlashInfer's prefill kernel for non-causal attention. Here `attention.base.visible`, which sets `hi`
for encoders and cross attention.
Symptom:
The output is scaled down for lengths that do not fill a tile. A simple test: with a query of zeros
the answer must be the exact mean.
Risk and impact:
Silent; lengths that are multiples of the tile, which tests tend to use, are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep import order
from lockstep.plan.step import Group, PagedGroup, StepPlan

SOURCE = "flashinfer-ai/flashinfer#3717"
TARGET = "lockstep.attention.base:visible"
CELLS = ("embed/encoder", "encode-decode/cross")
RELATED = ("sglang-10172", "sglang-33974")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def visible(plan: StepPlan, group: Group) -> Any:
        lo, hi = old(plan, group)
        if group.spec.causal:
            return lo, hi
        tile = order.tile_len(group.spec.d_qk, group.spec.d_v)
        there = plan.bucket.tokens - plan.q_indptr[:-1]
        if isinstance(group, PagedGroup):
            there = np.diff(group.page_indptr) * group.spec.page_size
        return lo, np.minimum(-(-hi // tile) * tile, there[plan.request]).astype(np.int32)

    return visible
