"""Timing on a machine that others use too: who disturbed a run, and what to do about it.

Timings on shared machines lie; so a run records the CPU time that others took (from /proc/stat,
where there is one) and a disturbed run does not count. `race` is for calls of microseconds,
`alternate` for measurements of seconds. Knows clocks, and nothing of what is measured.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lockstep.lab.document import command_line
from lockstep.lab.environment import environment
from lockstep.types import RuleError

BLOCKS = 4  # of calls per contender in a run
OTHERS = 0.05  # of the machine's CPU time may go to others in an undisturbed run
PATIENCE_S = 30.0  # to wait for others to be done, before a disturbed measurement is repeated

Measure = Callable[[int], float]  # of a seed that it never sees twice, in whatever unit it likes


@dataclass
class Watch:
    """Filled when the block ends: the fraction of the machine that others used."""

    others: float = 0.0

    @property
    def undisturbed(self) -> bool:
        return self.others <= OTHERS


@contextmanager
def watched(own: Callable[[], float] | None = None) -> Iterator[Watch]:
    """Watches what other processes do meanwhile. `own` gives the CPU seconds that are ours: without
    it, those of this process and of its children that have ended."""
    own = own or _own
    watch, begin, busy, ours = Watch(), time.perf_counter(), _busy(), own()
    yield watch
    have = (time.perf_counter() - begin) * (os.cpu_count() or 1)
    watch.others = max(0.0, ((_busy() - busy) - (own() - ours)) / have)


@dataclass
class Timing:
    """What each contender took, one entry per run; `others` is the fraction of the machine that
    others used meanwhile. `undisturbed` if no run was disturbed."""

    runs: dict[str, list[float]] = field(default_factory=dict)
    undisturbed: bool = True
    others: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.runs[name])


def race(
    contenders: dict[str, Callable[[], object]], runs: int, seconds: float, tries: int = 12
) -> Timing:
    """Times the contenders side by side: per run the median over alternating blocks. A disturbed
    run is repeated, at most `tries` times."""
    timing = Timing({name: [] for name in contenders})
    for call in contenders.values():
        call()
    while len(next(iter(timing.runs.values()))) < runs:
        with watched() as watch:
            medians = _blocks(contenders, seconds)
        if not watch.undisturbed and tries:
            tries -= 1
            continue
        timing.undisturbed &= watch.undisturbed
        for name, value in medians.items():
            timing.runs[name].append(value)
    return timing


def alternate(
    contenders: Mapping[str, Measure], runs: int, on_progress: Callable[[str], None], tries: int
) -> Timing:
    """Measures the contenders by turns, `runs` times each. A disturbed measurement is repeated, at
    most `tries` times; the least disturbed one counts."""
    timing = Timing({name: [] for name in contenders}, True, {name: [] for name in contenders})
    for run in range(runs):
        for name, measure in contenders.items():
            found: list[tuple[float, float]] = []
            while len(found) <= tries and (not found or min(found)[0] > OTHERS):
                again = f", disturbed, try {len(found) + 1}" if found else ""
                on_progress(f"{name}, run {run + 1} of {runs}{again}")
                if found:
                    wait_until_undisturbed()
                with watched() as watch:
                    value = measure(1 + run * (tries + 1) + len(found))
                found.append((watch.others, value))
            others, value = min(found)
            timing.undisturbed &= others <= OTHERS
            timing.others[name].append(round(others, 3))
            timing.runs[name].append(value)
    return timing


def wait_until_undisturbed() -> None:
    """Returns when nobody else works, or when patience is at its end."""
    end = time.perf_counter() + PATIENCE_S
    while time.perf_counter() < end:
        with watched() as watch:
            time.sleep(0.5)
        if watch.undisturbed:
            return


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
    """What is going on, on stderr: on a terminal a line that the next one replaces."""
    live = sys.stderr.isatty()
    line = f"\r\x1b[K{text} ..." if live else f"{text} ..."
    print(line, file=sys.stderr, end="" if live else "\n", flush=True)


def tell(text: str) -> None:
    """A line on stderr that stays."""
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _blocks(contenders: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Blocks of calls, the contenders alternating: within a block nobody else's waiting threads
    hold the cores."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(BLOCKS):
        for name, call in contenders.items():
            call()
            times[name] += block(call, seconds / BLOCKS / len(contenders))
    return {name: statistics.median(values) for name, values in times.items()}


def block(call: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of each call in a block: for so long, and three calls at least."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


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
