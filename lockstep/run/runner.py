"""Runs steps: pad, check, lower, load, launch. One path; a launch is plain, or recorded the first
time that its signature comes and replayed from then on.

Knows the pools and the backend, and of a model what its step kinds say; knows no request. `run`
takes a plan, the token of every row and the kind of the step. What a recorded launch returns is
memory that its next replay writes to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.kernels.operation import unmarked
from lockstep.kv.pool import Pool
from lockstep.ops import Ops
from lockstep.plan.bucket import Buckets, pad
from lockstep.plan.check import check
from lockstep.plan.image import ImageLayout, PlanArrays
from lockstep.plan.step import Bucket, Ints, Real, StepPlan
from lockstep.run.arena import Arena
from lockstep.run.kind import StepKind
from lockstep.run.step import Variants, bind, handles_of, layout_of, lower
from lockstep.run.tape import Tape
from lockstep.types import GroupSpec, Layout, RuleError

IMAGE_LEN = 1 << 22  # int32 of a step's image: 16 MB
LAYOUTS = 64  # that are remembered


class StepOutput(NamedTuple):
    """What a step computed, of its T real rows."""

    rows: Tensor  # [T, d] hidden states
    emitted: Tensor  # [S, d] of the rows that the plan emits
    layers: tuple[Tensor, ...] = ()  # [T, d] behind each of the kind's `hidden_layers`

    def only(self, real: Real) -> StepOutput:
        """Without what belongs to pads."""
        rows, layers = self.rows[: real.tokens], [each[: real.tokens] for each in self.layers]
        return StepOutput(rows, self.emitted[: real.emits], tuple(layers))


@dataclass(frozen=True)
class Signature:
    """All that a launch depends on besides the numbers in the arena, the weights and the cache."""

    bucket: Bucket
    kind: StepKind
    variants: Variants
    planner_buffers: tuple[int, ...]  # addresses

    def __str__(self) -> str:
        return f"a step of kind {self.kind.name} in {self.bucket}, variants {self.variants}"


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
        graphs: bool = False,
    ) -> None:
        if graphs and not backend.caps.graphs:
            rule = "launches are recorded with a backend that states `graphs`"
            got = f"{type(backend).__module__}, which does not"
            raise RuleError(rule, got, "Leave `graphs` out, or use another backend")
        if graphs and (missed := unmarked(ops)):
            rule = "every operation of a recorded launch is marked"
            raise RuleError(rule, f"{', '.join(missed)} are not", "Take it from kernels.select")
        self.specs, self.backend, self.buckets = tuple(specs), backend, buckets
        self.pools = [
            None if s.layout is Layout.FRESH else Pool(s, n, ops)
            for s, n in zip(specs, pages, strict=True)
        ]
        self.arena = Arena(IMAGE_LEN, ops.device)
        self.graphs = graphs
        self.tapes: dict[Signature, Tape] = {}
        self._layouts: dict[tuple[StepKind, Bucket], ImageLayout] = {}
        self._views: dict[ImageLayout, tuple[PlanArrays, ...]] = {}

    def run(self, plan: StepPlan, ids: Sequence[int] | Ints | Tensor, kind: StepKind) -> StepOutput:
        """One step. ids [T]: the token of every row, before padding."""
        plan = self.padded(plan)
        pools = [self.pools[g] for g in kind.groups]
        if self.checks:
            check(plan, tuple(p.num_pages if p else 0 for p in pools))
        layout = self._layout(plan, kind)
        tokens = np.asarray(ids, np.int32)
        variants = lower(plan, tokens, self.backend, layout, self.arena.host(layout.length))
        image = self.arena.load(layout.length)
        views = self._views.get(layout)
        if views is None:
            views = self._views[layout] = layout.views(image)

        def launch() -> StepOutput:
            """Everything it reads lies in the arena, the weights and the cache."""
            step = bind(layout, views, variants, self.backend, pools, kind.layer_map)
            step.relocate()
            wanted = (kind.hidden_layers,) if kind.hidden_layers else ()
            out = kind.forward(*inputs(views[0]), step, *wanted)
            hidden, *layers = out if wanted else (out,)
            return StepOutput(hidden, emitted(hidden, views[0]), tuple(layers))

        if not self.graphs:
            return launch().only(plan.real)
        buffers = planner_buffers(layout, views, variants, self.backend)
        signature = Signature(layout.bucket, kind, variants, buffers)
        return self._recorded(signature, launch).only(plan.real)

    def _layout(self, plan: StepPlan, kind: StepKind) -> ImageLayout:
        """Where the numbers of a step lie: the last ones are remembered, with their views, for the
        arena is always at the same address."""
        known = (kind, plan.bucket)
        if known not in self._layouts:
            if len(self._layouts) >= LAYOUTS:
                self._layouts.clear()
                self._views.clear()
            self._layouts[known] = layout_of(plan, self.backend)
        return self._layouts[known]

    def padded(self, plan: StepPlan) -> StepPlan:
        """The plan in the smallest bucket that holds it; without buckets as it is."""
        return plan if self.buckets is None else pad(plan, self.buckets.fit(plan))

    def _recorded(self, signature: Signature, launch: Callable[[], StepOutput]) -> StepOutput:
        """A launch that is new is recorded, a known one replayed."""
        tape = self.tapes.get(signature)
        if tape is None:
            tape = Tape(signature)
            tape.record(launch)
            self.tapes[signature] = tape
        else:
            tape.replay(signature)
        output: StepOutput = tape.output
        return output


def inputs(rows: PlanArrays) -> tuple[Tensor, Tensor]:
    """What a model is told: the token and the position of every row."""
    return rows.ids, rows.positions


def emitted(hidden: Tensor, rows: PlanArrays) -> Tensor:
    """The rows that the plan emits, and those that pad them."""
    return hidden.index_select(0, rows.emit)


def planner_buffers(
    layout: ImageLayout, views: Sequence[PlanArrays], variants: Variants, backend: Backend
) -> tuple[int, ...]:
    """Where the buffers lie that a library's planner keeps for this step."""
    names = backend.caps.planner_buffers
    handles = handles_of(layout, views, variants, backend) if names else ()
    return tuple(getattr(handle, name).data_ptr() for handle in handles for name in names)
