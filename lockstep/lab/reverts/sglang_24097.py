"""An embedding model skipped the cache write but still read the cache.

Summary:
A fast path for embedding models attends to this step's own keys and never writes the cache. For MLA
the write was skipped, but the read still used the cache, with whatever was there before.
Motivation:
The fast path (#21971) saves the cache traffic of models that never decode. It was guarded by "is an
embedding model, not chunked, no radix cache", but not by the kind of attention.
Mechanism:
1. One flag, fa_skip_kv_cache, is computed at start.
2. In forward_extend the flag skips the write for both layouts, dense and MLA.
3. The branch that reads raw K/V instead of the cache is inside `if not use_mla`, so MLA falls
   through to the cached read.
4. The rows of this step attend to slots that were not written: stale data of an earlier request, or
   uninitialised memory.
Key functions:
FlashAttentionBackend.__init__ (the flag) and forward_extend. Here `kv.pool.view`: a fresh group's
view passes this step's rows through and has no storage, so a stale read cannot be expressed; the
revert adds its own cache.
Symptom:
Embeddings depend on what ran before. With a poisoned cache: NaN in every output. No public MLA
embedding model existed at the time, so no user was hit; the fix is one more condition in the flag.
Risk and impact:
Latent, but severe: content of other requests can affect an embedding. A second bug of the same fast
path (#27343, padding) followed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.kv.pool import Keys, Pool, UncachedKv
from lockstep.plan.image import PlanArrays
from lockstep.types import GroupSpec, Layout

SOURCE = "sgl-project/sglang#24097, introduced by #21971"
TARGET = "lockstep.kv.pool:view"
CELLS = ("embed/embed-latent",)
RELATED = ("sglang-27343", "sglang-10172")


class Unwritten(UncachedKv):
    """Skips the write and reads a cache full of NaN."""

    def keys(self, layer: int, k: Tensor | None, v: Tensor | None) -> Keys:
        live = super().keys(layer, k, v)
        cache = torch.full_like(live.k, torch.nan)
        return Keys(cache, cache[..., : live.v.shape[-1]])


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def view(spec: GroupSpec, pool: Pool | None, views: PlanArrays) -> Any:
        absorbed = spec.layout is Layout.FRESH and spec.kv_heads == 1 and spec.d_v < spec.d_qk
        return Unwritten() if absorbed else old(spec, pool, views)

    return view
