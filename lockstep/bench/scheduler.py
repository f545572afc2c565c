"""What scheduling costs: CPU time per step with many decoding requests, part by part: schedule,
build, check, commit.

Knows the scheduler and the plan, and no model: the sampled tokens are made up. `bench engine` calls
`measure`.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

from lockstep.kv.pages import PagePool
from lockstep.plan.build import build
from lockstep.plan.check import check
from lockstep.run.kind import GENERATE, StepKind
from lockstep.sched.request import Ask, Step, Token
from lockstep.sched.scheduler import Limits, Scheduler
from lockstep.types import AttnSpec, GroupSpec, Layout

PAGE = 16
FULL = GroupSpec(Layout.DENSE, 4, 2, 8, 8, (AttnSpec(1.0),), page_size=PAGE)
WINDOW = GroupSpec(Layout.DENSE, 4, 2, 8, 8, (AttnSpec(1.0),), page_size=PAGE, window=512)
SPECS = {"full": (FULL,), "full and window 512": (FULL, WINDOW)}
SPARE = {
    "free pages": 1.5,
    "every page is evicted first": 0.1,
}  # how much larger the cache is than what the requests need


@dataclass(frozen=True)
class Load:
    """`requests` prompts of `prompt_len` tokens that decode for `steps` steps."""

    requests: int
    prompt_len: int
    steps: int


@dataclass
class Times:
    """CPU seconds of every step, by part."""

    schedule: list[float] = field(default_factory=list)
    build: list[float] = field(default_factory=list)
    check: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)

    def medians_us(self) -> dict[str, float]:
        """Microseconds per step of each part, and their sum."""
        parts = {
            name: round(statistics.median(values) * 1e6, 1) for name, values in vars(self).items()
        }
        return {**parts, "sum": round(sum(parts.values()), 1)}


def measure(load: Load) -> dict[str, dict[str, float]]:
    """Kind of model and state of the cache -> microseconds per step, part by part."""
    return {
        f"{kind}; {state}": play(specs, load, spare)
        for kind, specs in SPECS.items()
        for state, spare in SPARE.items()
    }


def play(specs: tuple[GroupSpec, ...], load: Load, spare: float) -> dict[str, float]:
    """What exceeds the need of the requests is filled with evictable pages first."""
    keys = load.prompt_len + load.steps + 1
    pools = [
        PagePool(2 + int(load.requests * (1 + spare) * -(-keys // spec.page_size)))
        for spec in specs
    ]
    scheduler = Scheduler(kinds(specs), pools, Limits(8192, load.requests))
    for i in range(load.requests * 2):  # the first half fills the cache and ends
        prompt = (i, *(j % 991 for j in range(load.prompt_len - 1)))
        scheduler.add(Ask(prompt, 1 if i < load.requests else load.steps + 1))
    warm, times = Times(), Times()
    while any(r.rows != 1 for r in scheduler.running) or scheduler.waiting or not scheduler.running:
        turn(scheduler, warm)
    for _ in range(load.steps - 1):
        turn(scheduler, times)
    return times.medians_us()


def kinds(specs: tuple[GroupSpec, ...]) -> dict[str, StepKind]:
    """Generating steps over these groups, of no model: nothing runs."""
    none: Any = None
    kind = StepKind(
        name=GENERATE,
        model=none,
        groups=tuple(range(len(specs))),
        specs=specs,
        layer_map=(),
        forward=none,
    )
    return {GENERATE: kind}


def turn(scheduler: Scheduler, times: Times) -> Step | None:
    """One step, timed part by part."""
    at = thread_time()
    step = scheduler.schedule()
    if step is None:
        return None
    times.schedule.append(thread_time() - at)
    at = thread_time()
    plan = build(step.kind.specs, step.works)
    times.build.append(thread_time() - at)
    at = thread_time()
    check(plan, tuple(pool.num_pages if pool is not None else 0 for pool in scheduler.pools))
    times.check.append(thread_time() - at)
    sampled = [[Token(piece.cached_len % 997)] * piece.samples for piece in step.pieces]
    at = thread_time()
    scheduler.commit(step, sampled)
    times.commit.append(thread_time() - at)
    return step
