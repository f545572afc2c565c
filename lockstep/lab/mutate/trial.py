"""One job in a process of its own: tests of one tree, what they come to and what they reach.

`pool` forks the process from one that has imported what is slow. Lockstep must come from the job's
tree, so nothing here imports it. A unit is a test by its node id, or all tests of a file; cells of
the lab are tests of `tests/lab_cells.py`.
"""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

KERNELS = ".kernels"  # a tree's own cache folder, beside its files
HANG_S = 20.0  # a unit that takes this much longer than ten times its time hangs
HANG_FACTOR = 10.0
UNKNOWN_S = 600.0  # the limit of a unit whose time is not known
START_S = 120.0  # from the fork to the first unit, and between two
PYTEST = (
    *("-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--hypothesis-seed=0"),
    "--continue-on-collection-errors",
)


@dataclass(frozen=True)
class Job:
    units: Sequence[str]
    changes: Mapping[str, str] = field(default_factory=dict)  # file → text
    seconds: Mapping[str, float] = field(default_factory=dict)  # what a unit took without a mutant
    stop: bool = True  # at the first failure
    measure: bool = False  # coverage
    keep: bool = False  # what was compiled is there for the next job
    limit_s: float = float("inf")  # of the whole job
    hang_s: float = HANG_S

    def unit_s(self, unit: str) -> float:
        """How long a unit may take; "" is what comes before the first, and between two."""
        if unit in self.seconds:
            return self.hang_s + HANG_FACTOR * self.seconds[unit]
        return UNKNOWN_S if unit or self.measure else START_S


def run(job: Job, tree: Path) -> None:
    """The process: runs the units in a tree and reports them beside it; leaves by os._exit."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests interrupt themselves
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] == "lockstep"]:
        del sys.modules[name]
    os.environ |= {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(tree / KERNELS)}
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "LOCKSTEP_REVERT": ""}
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import pytest
    from coverage import Coverage
    from hypothesis import HealthCheck, Phase, settings

    # the same examples every time, no deadlines, no shrinking: any failure is a kill
    fixed: dict[str, Any] = {"deadline": None, "derandomize": True, "database": None}
    phases, unchecked = (Phase.explicit, Phase.generate), list(HealthCheck)
    settings.register_profile("mutate", phases=phases, suppress_health_check=unchecked, **fixed)
    settings.load_profile("mutate")
    include = [f"{tree}/lockstep/*"]
    measure = Coverage(data_file=None, include=include, config_file=False) if job.measure else None
    # hundreds of node ids are slower to match than their files are to collect
    paths = dict.fromkeys(map(file_of, job.units))
    with tree.with_suffix(".jsonl").open("w", encoding="utf-8") as stream:
        watch = Watch(job, stream, log, measure)
        pytest.main([*PYTEST, *paths], plugins=[watch])
        if measure is not None:
            measure.stop()
            for unit, lines in reached(measure, tree).items():
                watch.send(reached=unit, lines=lines)
    os._exit(0)


def file_of(unit: str) -> str:
    return unit.partition("::")[0]


class Watch:
    """The pytest plugin of a job: what runs, in which order, what it came to, what it reached. Says
    so in lines of JSON, and ends the process when a unit takes too long."""

    def __init__(self, job: Job, stream: TextIO, log: int, measure: Any) -> None:
        self.job, self.stream, self.log, self.measure = job, stream, log, measure
        self.broken: set[str] = set()  # test files that cannot be imported
        self.reports: list[Any] = []  # of the unit that runs
        if measure is not None:
            measure.start()
        self.running("")

    def send(self, **message: Any) -> None:
        print(json.dumps(message), file=self.stream, flush=True)

    def running(self, unit: str) -> None:
        """This unit runs, or with "" none. Beyond its time the process ends; the log says where."""
        faulthandler.dump_traceback_later(self.job.unit_s(unit), exit=True, file=self.log)
        self.send(running=unit)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Only what was asked for, in that order."""
        found: dict[str, list[Any]] = {}
        for item in items:
            found.setdefault(item.nodeid, []).append(item)
            found.setdefault(file_of(item.nodeid), []).append(item)
        items[:] = [item for unit in self.job.units for item in found.get(unit, ())]
        for unit in self.job.units:
            if unit not in found and file_of(unit) not in self.broken:
                self.finished(unit, "gone")

    def pytest_collectreport(self, report: Any) -> None:
        """A test file that cannot be imported has failed, and with it all its tests."""
        if report.failed:
            self.broken.add(report.nodeid)
            tests = [unit for unit in self.job.units if file_of(unit) == report.nodeid]
            for unit in tests or [report.nodeid]:
                self.finished(unit, "failed", detail=last_line(str(report.longrepr)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reports = []
        if self.measure is not None:
            if sys.gettrace() is None:  # a test had a trace function of its own
                self.measure.stop()
                self.measure.start()
            self.measure.switch_context(nodeid)
        self.running(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A unit is set up, called and torn down; it has failed when any of these has."""
        self.reports.append(report)
        if report.when != "teardown":
            return
        if self.measure is not None:
            self.measure.switch_context("")
        failed = [last_line(str(each.longrepr)) for each in self.reports if each.failed]
        outcome = "skipped" if any(each.skipped for each in self.reports) else "passed"
        if failed:
            outcome = "failed"
        seconds = sum(each.duration for each in self.reports)
        self.finished(report.nodeid, outcome, round(seconds, 4), "".join(failed[:1]))
        self.running("")

    def finished(self, unit: str, outcome: str, seconds: float = 0.0, detail: str = "") -> None:
        """Reports what a unit came to; where one failure is enough, that is the end."""
        self.send(name=unit, outcome=outcome, seconds=seconds, detail=detail)
        if outcome == "failed" and self.job.stop:
            os._exit(0)


def last_line(text: str) -> str:
    """What an error says, without where: pytest marks these lines with E."""
    lines = [line for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or ["failed"])[0][:300]


def reached(measure: Any, tree: Path) -> dict[str, dict[str, list[int]]]:
    """Unit → file → lines. "" has what ran outside of units: imports."""
    data = measure.get_data()
    out: dict[str, dict[str, list[int]]] = {}
    for name in sorted(data.measured_files()):
        short = str(Path(name).relative_to(tree))
        for line, units in sorted(data.contexts_by_lineno(name).items()):
            for unit in units:
                out.setdefault(unit, {}).setdefault(short, []).append(line)
    return out
