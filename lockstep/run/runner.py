"""Runs steps: pad, check, load, lower, launch. One path; a captured graph will be another state of
the same call.

Knows the model, the pools and the backend; knows no request. `run` takes a plan and the token of
every row and returns what the plan emits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.kv.pool import Pool
from lockstep.nn.attention import Place
from lockstep.plan.bucket import Buckets, pad
from lockstep.plan.check import check
from lockstep.plan.step import StepPlan
from lockstep.run.arena import Arena
from lockstep.run.step import lower
from lockstep.types import GroupSpec, Layout

Forward = Callable[..., Tensor]  # ids, positions, step → rows
IMAGE_LEN = 1 << 22  # int32 of a plan's image: 16 MB


class Runner:
    """A model on a device with its cache. A plan may use some of the groups: `groups` says which,
    by number."""

    # plans are checked before they run; the lab switches it off to see what else would notice
    checks = True

    def __init__(
        self,
        model: Any,
        specs: Sequence[GroupSpec],
        pages: Sequence[int],
        backend: Backend,
        buckets: Buckets | None = None,
    ) -> None:
        device = torch.device("cpu")
        self.model, self.specs, self.backend, self.buckets = model, tuple(specs), backend, buckets
        self.pools = [
            None if s.layout is Layout.FRESH else Pool(s, n, device)
            for s, n in zip(specs, pages, strict=True)
        ]
        self.arena = Arena(IMAGE_LEN, device)

    def run(
        self, plan: StepPlan, ids: Tensor, groups: Sequence[int], places: Sequence[Place]
    ) -> Tensor:
        """Hidden states of the rows that the plan emits. ids [T]: the token of every row, before
        padding."""
        return self.rows(plan, ids, groups, places)[
            torch.from_numpy(plan.emit[: plan.real.emits].astype("int64"))
        ]

    def rows(
        self,
        plan: StepPlan,
        ids: Tensor,
        groups: Sequence[int],
        places: Sequence[Place],
        forward: Forward | None = None,
    ) -> Tensor:
        """Hidden states of all rows, real ones only. `forward` is what runs, if not the model
        itself: an encoder."""
        pools = [self.pools[g] for g in groups]
        real = len(ids)
        plan, ids = self.padded(plan, ids)
        if self.checks:
            check(plan, tuple(p.num_pages if p else 0 for p in pools))
        views = self.arena.load(plan)
        hidden: Tensor = (forward or self.model)(
            ids, views[0].positions, lower(plan, views, self.backend, pools, places)
        )
        return hidden[:real]

    def padded(self, plan: StepPlan, ids: Tensor) -> tuple[StepPlan, Tensor]:
        """The plan in the smallest bucket that holds it, and token 0 for every pad row; without
        buckets as it is."""
        if self.buckets is None:
            return plan, ids
        plan = pad(plan, self.buckets.fit(plan))
        return plan, torch.cat((ids, ids.new_zeros(plan.bucket.tokens - len(ids))))
