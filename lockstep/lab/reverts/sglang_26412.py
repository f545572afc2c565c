"""Fixed splits were passed on for full attention but not for window and cross attention.

Summary:
SGLang's deterministic mode fixes how FlashInfer cuts the keys of a row into splits. The
sliding-window and cross-attention updaters did not pass on the two arguments for this, so there the
library chose the cut from the whole batch.
Motivation:
`--enable-deterministic-inference` promises log-probabilities that do not depend on the other
requests in the batch. On models with windows or an encoder the promise was broken: 22 of 43
log-probabilities differed between batch sizes in the author's measurement, 0 afterwards.
Mechanism:
1. A planner that is free to choose balances the batch: it divides all keys of all requests by the
   number of workers.
2. Every request that joins or leaves moves the split boundaries of all other requests.
3. Each split is an online softmax, and merging splits adds one rounding each: another cut gives
   other last bits.
4. Four leaf methods (window and cross, decode and prefill) called the planner without
   `fixed_split_size` and `disable_split_kv`, although both had been passed to them. The
   single-wrapper path did pass them, so plain models never showed it.
Key functions:
FlashInferIndicesUpdaterDecode / Prefill .update_sliding_window and .update_cross_attention. Here
`attention.cpu.Backend.bind`, which sees the plan but must not use it here: the split is the
constant `order.SPLIT_LEN`.
Symptom:
Values are right to the last few bits; bits change with the batch. Only a bitwise comparison can see
it. As far as we can read, the fix left verify and draft-extend steps without a fixed split.
Risk and impact:
Silent: no error and no visible loss of quality, but every promise built on equal bits (replay,
caching, audits) is void for such models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep import order
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket
from lockstep.types import GroupSpec, Layout

SOURCE = "sgl-project/sglang#26412"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("window-edges/window", "encode-decode/cross")
RELATED = ("sglang-10721", "vllm-51902", "sglang-27869")

WORKERS = 2


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Any) -> Any:
        handle = old(self, spec, bucket, views, variant)
        forgotten = spec.window is not None or not spec.causal
        if not forgotten or spec.layout is Layout.FRESH or not len(views.positions):
            return handle
        tile = order.tile_len(spec.d_qk, spec.d_v)
        keys = int(views.kv_lens.sum())
        return replace(handle, split=-(-keys // (WORKERS * tile)) * tile)

    return bind
