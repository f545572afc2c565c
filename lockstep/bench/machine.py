"""What a benchmark ran on, and whether anybody disturbed it.

Timings on shared machines lie; so a run records the CPU time that others took (from /proc/stat, where there is one) and a disturbed run
does not count. Knows clocks and versions, and nothing of what is measured.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

BLOCKS = 4  # turns per contender in a run
QUIET = 0.05  # of the machine's CPU time may go to others in an undisturbed run


@dataclass
class Quiet:
    """Filled when the block ends: the fraction of the machine that others used."""

    others: float = 0.0

    @property
    def undisturbed(self) -> bool:
        return self.others <= QUIET


@contextmanager
def watched() -> Iterator[Quiet]:
    """Watches what other processes do meanwhile."""
    quiet, begin, busy, own = Quiet(), time.perf_counter(), _busy(), _own()
    yield quiet
    wall, cores = time.perf_counter() - begin, os.cpu_count() or 1
    quiet.others = max(0.0, ((_busy() - busy) - (_own() - own)) / (wall * cores))


@dataclass
class Timing:
    """Seconds of each contender, one entry per run; `quiet` says that no run was disturbed."""

    runs: dict[str, list[float]] = field(default_factory=dict)
    quiet: bool = True

    def median(self, name: str) -> float:
        return statistics.median(self.runs[name])


def race(contenders: dict[str, Callable[[], object]], runs: int, seconds: float, tries: int = 12) -> Timing:
    """Times the contenders side by side: per run the median over alternating blocks. A disturbed run is repeated, at most `tries` times."""
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


def _run(contenders: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Blocks of calls, the contenders taking turns: within a block nobody else's waiting threads hold the cores."""
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


def environment() -> dict[str, object]:
    """Hardware and versions."""
    import llvmlite
    import numba
    import numpy
    import torch

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "numpy": numpy.__version__,
        "commit": commit(),
        "command": "lockstep " + " ".join(sys.argv[1:]),
    }


def cpu_name() -> str:
    """The processor as the system names it, with the vector sets that matter."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    fields = dict(line.split("\t: ", 1) for line in info.read_text().splitlines() if "\t: " in line)
    flags = fields.get("flags", "").split()
    return " ".join([fields.get("model name", "unknown"), *(f for f in ("avx2", "avx512f") if f in flags)])


def commit() -> str:
    """The commit of the checkout the package lies in, with + for local changes; '' outside of one."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if dirty else "")


def _busy() -> float:
    """CPU seconds the whole machine has worked, time stolen from it included."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return _own()
    user, nice, system, _, _, irq, softirq, steal, *_ = map(float, stat.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    times = os.times()
    return times.user + times.system
