"""A lowered step, as a model's layers see it: `attend(layer, q, k, v)`, and `store` for an
encoder's keys.

Writes this step's keys, then attends: always in this order, for every layer, in one place. A model
never sees a request, a page or a plan. Made by `lower` before every launch: host work, and the
plan's moves of K/V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.kv import pool as kv
from lockstep.kv.pool import Pool
from lockstep.nn.attention import GroupLayer
from lockstep.plan.image import Views
from lockstep.plan.step import StepPlan


@dataclass(frozen=True, eq=False)
class Step:
    """One step, ready to run. `layer_map` maps a model's attention layers to groups."""

    plan: StepPlan
    views: tuple[Views, ...]
    backend: Backend
    stores: tuple[kv.PagedView | kv.FreshView, ...]
    handles: tuple[Any, ...]
    layer_map: Sequence[GroupLayer]

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """q [T, heads, d_qk], k [T, kv_heads, d_qk], v [T, kv_heads, d_v] of this step's rows;
        returns [T, heads, d_v].

        A layer that only reads (cross attention of a decoder) passes None for k and v.
        """
        at = self.layer_map[layer]
        keys = self.stores[at.group].keys(at.layer, k, v)
        out, _ = self.backend.attend(
            q, keys, self.handles[at.group], self.plan.groups[at.group].spec.layers[at.layer]
        )
        return out

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes keys that no row of this step attends to: an encoder's step fills the decoder's
        cross groups."""
        at = self.layer_map[layer]
        self.stores[at.group].keys(at.layer, k, v)


def lower(
    plan: StepPlan,
    views: tuple[Views, ...],
    backend: Backend,
    pools: Sequence[Pool | None],
    layer_map: Sequence[GroupLayer],
) -> Step:
    """Relocates what the plan moves and asks the backend for its handles. `pools` holds one entry
    per group of the plan."""
    stores = tuple(
        kv.view(g.spec, pool, v) for g, pool, v in zip(plan.groups, pools, views, strict=True)
    )
    for store in stores:
        store.relocate()
    handles = tuple(backend.lower(plan, g, v) for g, v in zip(plan.groups, views, strict=True))
    return Step(plan, views, backend, stores, handles, layer_map)
