"""Timing on a machine that others use too: contenders are measured by turns, and a run in which
others took CPU time (by /proc/stat, where there is one) does not count. Knows clocks, and nothing
of what is measured.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lockstep.bench.contender import block_median
from lockstep.lab.document import command_line, environment
from lockstep.types import RuleError

OTHERS = 0.05  # of the machine's CPU time may go to others in an undisturbed run
PATIENCE_S = 30.0  # to wait for others to be done, before a disturbed measurement is repeated

Measure = Callable[[int], float]  # of a seed that it never sees twice, in whatever unit it likes
Answer = TypeVar("Answer")


def watched(
    measure: Callable[[], Answer], own: Callable[[], float] | None = None
) -> tuple[float, Answer]:
    """What others used of the machine meanwhile, as a fraction, and what `measure` gave. `own`
    gives the CPU seconds that are ours: those of this process, if it is left out."""
    own = own or _own
    begin, busy, ours = time.perf_counter(), _busy(), own()
    answer = measure()
    have = (time.perf_counter() - begin) * (os.cpu_count() or 1)
    return max(0.0, ((_busy() - busy) - (own() - ours)) / have), answer


@dataclass
class Timing:
    """What each contender took, one entry per run."""

    runs: dict[str, list[Any]] = field(default_factory=dict)
    undisturbed: bool = True  # all of them
    others: dict[str, list[float]] = field(default_factory=dict)  # fractions of the machine

    def add(self, name: str, others: float, value: Any) -> None:
        self.runs.setdefault(name, []).append(value)
        self.others.setdefault(name, []).append(round(others, 3))
        self.undisturbed &= others <= OTHERS

    def median(self, name: str) -> float:
        return float(statistics.median(self.runs[name]))

    def scaled(self, by: float) -> "Timing":
        return replace(self, runs={n: [by * v for v in runs] for n, runs in self.runs.items()})


def alternate(
    contenders: Mapping[str, Callable[[int], Any]],
    runs: int,
    tries: int,
    own: Callable[[], float] | None = None,
) -> Timing:
    """Measures contenders by turns, `runs` times each; who begins alternates. While others use the
    machine a run is repeated, with a seed of its own, at most `tries` times: the least disturbed
    one counts."""
    timing, names = Timing(), list(contenders)
    for run in range(runs):
        for name in names if run % 2 == 0 else reversed(names):
            found: list[tuple[float, int, Any]] = []
            while len(found) <= tries and (not found or min(found)[0] > OTHERS):
                again = f", disturbed, try {len(found) + 1}" if found else ""
                note(f"{name}, run {run + 1} of {runs}{again}")
                end = time.perf_counter() + (PATIENCE_S if found else 0.0)
                while time.perf_counter() < end and watched(partial(time.sleep, 0.5))[0] > OTHERS:
                    pass
                seed = 1 + run * (tries + 1) + len(found)
                others, answer = watched(partial(contenders[name], seed), own)
                found.append((others, len(found), answer))
            others, _, answer = min(found)
            timing.add(name, others, answer)
    return timing


def called(call: Callable[[], object], seconds: float) -> Measure:
    """The median of a block of calls of microseconds, each contender's for itself: within a block
    nobody else's waiting threads hold the cores."""
    return lambda _: block_median(call, seconds)


def place(threads: int) -> dict[str, object]:
    """Where, with how many threads and by which command: the head of a benchmark's document."""
    return {**environment(), "threads": threads, "command": command_line()}


def set_threads(count: int | None) -> int:
    """The same number for torch and for our kernels; without one, torch's own."""
    wanted, most = count or torch.get_num_threads(), os.cpu_count() or 1
    if wanted > most:
        rule = f"--threads is at most the {most} cores"
        raise RuleError(rule, str(wanted), "Leave it out for all of them")
    torch.set_num_threads(wanted)
    return wanted


def note(text: str) -> None:
    """What is going on, on a terminal: a line that the next one replaces."""
    if sys.stderr.isatty():
        tell(f"{text} ...", end="")


def tell(text: str, end: str = "\n") -> None:
    """A line on stderr that stays."""
    begin = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{begin}{text}", file=sys.stderr, end=end, flush=True)


def _busy() -> float:
    """CPU seconds the whole machine has worked, time stolen from it included."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return _own()
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        float, stat.read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """CPU seconds of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
