"""Timing on a machine that others use too: who disturbed a run, and what to do about it.

Timings on shared machines lie; so a run records the CPU time that others took (from /proc/stat,
where there is one) and a disturbed run does not count. `race` is for calls of microseconds, `turns`
for measurements of seconds. Knows clocks, and nothing of what is measured.
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

from lockstep.lab.document import command_line
from lockstep.lab.environment import environment

BLOCKS = 4  # turns per contender in a run
QUIET = 0.05  # of the machine's CPU time may go to others in an undisturbed run
PATIENCE_S = 30.0  # to wait for others to be done, before a disturbed measurement is repeated


@dataclass
class Quiet:
    """Filled when the block ends: the fraction of the machine that others used, and how long it
    took."""

    others: float = 0.0
    wall_s: float = 0.0

    @property
    def undisturbed(self) -> bool:
        return self.others <= QUIET


@contextmanager
def watched() -> Iterator[Quiet]:
    """Watches what other processes do meanwhile."""
    quiet, begin, busy, own = Quiet(), time.perf_counter(), _busy(), _own()
    yield quiet
    quiet.wall_s, cores = time.perf_counter() - begin, os.cpu_count() or 1
    quiet.others = max(0.0, ((_busy() - busy) - (_own() - own)) / (quiet.wall_s * cores))


@dataclass
class Timing:
    """What each contender took, one entry per run; `others` is the fraction of the machine that
    others used meanwhile.

    `quiet` says that no run was disturbed.
    """

    runs: dict[str, list[float]] = field(default_factory=dict)
    quiet: bool = True
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
        with watched() as quiet:
            medians = _run(contenders, seconds)
        if not quiet.undisturbed and tries:
            tries -= 1
            continue
        timing.quiet &= quiet.undisturbed
        for name, value in medians.items():
            timing.runs[name].append(value)
    return timing


def turns(
    contenders: Mapping[str, Callable[[int], float]],
    runs: int,
    say: Callable[[str], None],
    tries: int,
) -> Timing:
    """Measures the contenders in turns, `runs` times each. A disturbed measurement is repeated, at
    most `tries` times; the quietest counts.

    A contender is called with a number that it never sees twice, from 1 on, and returns its result
    in whatever unit it likes.
    """
    timing = Timing({name: [] for name in contenders}, True, {name: [] for name in contenders})
    for run in range(runs):
        for name, measure in contenders.items():
            found: list[tuple[float, float]] = []
            while len(found) <= tries and (not found or min(found)[0] > QUIET):
                say(
                    f"{name}, run {run + 1} of "
                    f"{runs}{f', disturbed, try {len(found) + 1}' if found else ''}"
                )
                if found:
                    wait_for_quiet()
                with watched() as quiet:
                    value = measure(1 + run * (tries + 1) + len(found))
                found.append((quiet.others, value))
            others, value = min(found)
            timing.quiet &= others <= QUIET
            timing.others[name].append(round(others, 3))
            timing.runs[name].append(value)
    return timing


def wait_for_quiet() -> None:
    """Returns when nobody else works, or when patience is at its end."""
    end = time.perf_counter() + PATIENCE_S
    while time.perf_counter() < end:
        with watched() as quiet:
            time.sleep(0.5)
        if quiet.undisturbed:
            return


def place(threads: int) -> dict[str, object]:
    """Where, with how many threads and by which command: the head of a benchmark's document."""
    return {**environment(), "threads": threads, "command": command_line()}


def note(text: str) -> None:
    """What is going on, on stderr: on a terminal a line that the next one replaces."""
    live = sys.stderr.isatty()
    print(
        f"\r\x1b[K{text} ..." if live else f"{text} ...",
        file=sys.stderr,
        end="" if live else "\n",
        flush=True,
    )


def tell(text: str) -> None:
    """A line on stderr that stays."""
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _run(contenders: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Blocks of calls, the contenders taking turns: within a block nobody else's waiting threads
    hold the cores."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(BLOCKS):
        for name, call in contenders.items():
            call()
            end, least = time.perf_counter() + seconds / BLOCKS / len(contenders), 3
            while time.perf_counter() < end or least > 0:
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
                least -= 1
    return {name: statistics.median(values) for name, values in times.items()}


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
