"""What scheduling costs: CPU microseconds per step with 64 decoding requests, part by part. Nothing is asserted.

    python tools/sched_cost.py [--requests 64] [--prompt-len 2048] [--page-size 16] [--steps 200]

Knows the scheduler and the plan, and no model: the sampled tokens are made up.
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass, field
from time import thread_time

from lockstep.kv.pages import PagePool
from lockstep.plan.build import build
from lockstep.plan.check import check
from lockstep.sched.request import Ask, Step, Token
from lockstep.sched.scheduler import Kinds, Limits, Scheduler
from lockstep.types import AttnSpec, GroupSpec, Layout


@dataclass
class Times:
    schedule: list[float] = field(default_factory=list)
    build: list[float] = field(default_factory=list)
    check: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)

    def report(self) -> str:
        """Median and worst, in microseconds."""
        rows = [(name, sorted(values)) for name, values in vars(self).items()]
        total = sum(values[len(values) // 2] for _, values in rows)
        lines = [f"{name:10} {values[len(values) // 2] * 1e6:8.0f} us   worst {values[-1] * 1e6:8.0f} us" for name, values in rows]
        return "\n".join([*lines, f"{'sum':10} {total * 1e6:8.0f} us"])


def turn(scheduler: Scheduler, times: Times) -> Step | None:
    """One step, timed part by part."""
    at = thread_time()
    step = scheduler.schedule()
    if step is None:
        return None
    times.schedule.append(thread_time() - at)
    at = thread_time()
    plan = build([scheduler.specs[g] for g in step.groups], step.works)
    times.build.append(thread_time() - at)
    at = thread_time()
    check(plan, tuple(pool.num_pages if pool is not None else 0 for pool in scheduler.pools))
    times.check.append(thread_time() - at)
    sampled = [[Token(piece.cached_len % 997)] * piece.samples for piece in step.pieces]
    at = thread_time()
    scheduler.commit(step, sampled)
    times.commit.append(thread_time() - at)
    return step


def measure(specs: tuple[GroupSpec, ...], args: argparse.Namespace, spare: float) -> str:
    """`spare`: how much larger the cache is than what the requests need; what exceeds it is filled with evictable pages first."""
    keys = args.prompt_len + args.steps + 1
    pools = [PagePool(2 + int(args.requests * (1 + spare) * -(-keys // spec.page_size))) for spec in specs]
    scheduler = Scheduler(specs, pools, Kinds(tuple(range(len(specs)))), Limits(8192, args.requests))
    for i in range(args.requests * 2):  # the first half fills the cache and ends
        prompt = (i, *(j % 991 for j in range(args.prompt_len - 1)))
        scheduler.add(Ask(prompt, 1 if i < args.requests else args.steps + 1))
    warm, times = Times(), Times()
    while any(r.rows != 1 for r in scheduler.running) or scheduler.waiting or not scheduler.running:
        turn(scheduler, warm)
    for _ in range(args.steps - 1):
        turn(scheduler, times)
    return times.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("requests", 64), ("prompt-len", 2048), ("page-size", 16), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    full = GroupSpec(Layout.DENSE, 4, 2, 8, 8, (AttnSpec(1.0),), page_size=args.page_size)
    window = GroupSpec(Layout.DENSE, 4, 2, 8, 8, (AttnSpec(1.0),), page_size=args.page_size, window=512)
    print(f"{platform.machine()}, Python {platform.python_version()}; {args}")
    for name, specs in (("full", (full,)), ("full and window 512", (full, window))):
        for spare in (1.5, 0.1):
            print(f"\n{name}; a cache {1 + spare:.1f} times what runs ({'free pages' if spare > 1 else 'every page is evicted first'})")
            print(measure(specs, args, spare))


if __name__ == "__main__":
    main()
