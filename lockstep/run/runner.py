"""Runs steps: pad, check, load, lower, launch. One path; a captured graph will be another state of
the same call.

Knows the pools and the backend, and of a model what its step kinds say; knows no request. `run`
takes a plan, the token of every row and the kind of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.kv.pool import Pool
from lockstep.ops import Ops
from lockstep.plan.bucket import Buckets, pad
from lockstep.plan.check import check
from lockstep.plan.step import StepPlan
from lockstep.run.arena import Arena
from lockstep.run.kind import StepKind
from lockstep.run.step import lower
from lockstep.types import GroupSpec, Layout

IMAGE_LEN = 1 << 22  # int32 of a plan's image: 16 MB


class StepOutput(NamedTuple):
    """What a step computed, of its T real rows."""

    rows: Tensor  # [T, d] hidden states
    emitted: Tensor  # [S, d] of the rows that the plan emits
    layers: tuple[Tensor, ...] = ()  # [T, d] behind each of the kind's `hidden_layers`


class Runner:
    """The groups of an engine, with their pools, on a device. A step uses those that its kind
    names."""

    # plans are checked before they run; the lab switches it off to see what else would notice
    checks = True

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        pages: Sequence[int],
        backend: Backend,
        ops: Ops,
        buckets: Buckets | None = None,
    ) -> None:
        self.specs, self.backend, self.buckets = tuple(specs), backend, buckets
        self.pools = [
            None if s.layout is Layout.FRESH else Pool(s, n, ops)
            for s, n in zip(specs, pages, strict=True)
        ]
        self.arena = Arena(IMAGE_LEN, ops.device)

    def run(self, plan: StepPlan, ids: Tensor, kind: StepKind) -> StepOutput:
        """One step. ids [T]: the token of every row, before padding."""
        pools = [self.pools[g] for g in kind.groups]
        real = len(ids)
        plan, ids = self.padded(plan, ids)
        if self.checks:
            check(plan, tuple(p.num_pages if p else 0 for p in pools))
        views = self.arena.load(plan)
        step = lower(plan, views, self.backend, pools, kind.layer_map)
        wanted = (kind.hidden_layers,) if kind.hidden_layers else ()
        out = kind.forward(ids, views[0].positions, step, *wanted)
        rows, *layers = [each[:real] for each in (out if wanted else (out,))]
        emit = torch.from_numpy(plan.emit[: plan.real.emits].astype("int64"))
        return StepOutput(rows, rows[emit], tuple(layers))

    def padded(self, plan: StepPlan, ids: Tensor) -> tuple[StepPlan, Tensor]:
        """The plan in the smallest bucket that holds it, and token 0 for every pad row; without
        buckets as it is."""
        if self.buckets is None:
            return plan, ids
        plan = pad(plan, self.buckets.fit(plan))
        return plan, torch.cat((ids, ids.new_zeros(plan.bucket.tokens - len(ids))))
