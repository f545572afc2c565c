"""Runs jobs, each in a process of its own on a copy of the repository, which never changes.

A job is a list of units and changed files. A unit is a test by its node id, or all tests of a file;
cells of the lab are tests of `tests/lab_cells.py`. Every worker has a tree, whose files are changed
for a job and restored with their time stamps, so that Numba never recompiles what is not mutated.
The process is forked from one that has imported the slow packages, and imports Lockstep from its
tree. Knows nothing of mutants. `campaign` calls it.
"""

import faulthandler
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, TextIO, TypeVar

from lockstep.lab import table
from lockstep.types import RuleError

OWN = ("lockstep/lab/mutate/", "tests/test_mutate.py")
TABLE = table("mutate.toml", "lockstep.lab.mutate")
HANG_S = 20.0  # a unit hangs if it takes this much longer than HANG_FACTOR times its time
HANG_FACTOR = 10.0
UNKNOWN_S = 600.0  # the limit of a unit with unknown time
START_S = 120.0  # limit from the fork to the first unit, and between two
HUNG = 1  # exit code of a process that faulthandler ended

Item = TypeVar("Item")
Made = TypeVar("Made")


def repository() -> Path:
    """Returns the checkout that this package was imported from."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "tests").is_dir() or not (root / ".git").exists():
        rule = "lab mutate runs in a checkout with tests"
        raise RuleError(rule, f"{root} without tests/ or .git", "Run it in a clone")
    return root


def listed(root: Path) -> list[str]:
    """Returns every file that git tracks or would add, as relative paths."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    return sorted({name for name in done.stdout.split("\0") if name and (root / name).is_file()})


def digests(root: Path) -> dict[str, str]:
    """Returns digests of package and test files, these tools excepted, and of pyproject.toml."""
    found = [n for n in listed(root) if n.startswith(("lockstep/", "tests/")) and n.endswith(".py")]
    named = [n for n in found if not n.startswith(OWN)]
    return {name: digest((root / name).read_bytes()) for name in [*named, "pyproject.toml"]}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def file_of(unit: str) -> str:
    return unit.partition("::")[0]


@dataclass(frozen=True)
class Job:
    units: Sequence[str]
    changes: Mapping[str, str] = field(default_factory=dict)  # file → text
    seconds: Mapping[str, float] = field(default_factory=dict)  # a unit's time without a mutant
    stop: bool = True  # stop at the first failure
    measure: bool = False  # run under coverage
    limit_s: float | None = None  # of the whole job
    hang_s: float = HANG_S

    def unit_s(self, unit: str) -> float:
        """Returns a unit's time limit; "" is the time before the first unit, and between two."""
        if unit in self.seconds:
            return self.hang_s + HANG_FACTOR * self.seconds[unit]
        return UNKNOWN_S if unit or self.measure else START_S


@dataclass
class JobReport:
    """The outcome of a job."""

    units: dict[str, dict[str, Any]] = field(default_factory=dict)  # outcome, seconds, detail
    reached: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # unit → file → lines
    end: str = ""  # "late", or how the process ended


class Crew:
    """Runs up to `count` jobs in parallel, on copies of `root` in a work folder."""

    def __init__(self, root: Path, work: Path, count: int, warm: Sequence[str]) -> None:
        self.count, self.template = count, work / "template"
        shutil.rmtree(self.template, ignore_errors=True)
        for name in listed(root):
            (self.template / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, self.template / name)
        self._idle = [work / f"tree{worker}" for worker in range(count)]
        for tree in self._idle:
            shutil.rmtree(tree, ignore_errors=True)
            shutil.copytree(self.template, tree)
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(warm))
        self._stopped = False

    def map(self, function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
        """Yields `function(item)`, which runs jobs, for each item; an error ends all jobs."""
        with ThreadPoolExecutor(self.count) as pool:
            try:
                yield from pool.map(function, items)
            except BaseException:
                self._stopped = True
                for process in active_children():
                    process.kill()
                raise

    def run(self, job: Job) -> JobReport:
        """Runs a job in a tree with its changes; kernels compiled for these are removed."""
        tree = self._idle.pop()
        kernels = tree.with_suffix(".kernels") / "lockstep"
        kept = set(kernels.glob("*"))
        try:
            for name, text in job.changes.items():
                (tree / name).write_text(text, encoding="utf-8")
            return self._forked(job, tree)
        finally:
            for name in job.changes:
                shutil.copy2(self.template / name, tree / name)
            if job.changes:
                for folder in set(kernels.glob("*")) - kept:
                    shutil.rmtree(folder)
            self._idle.append(tree)

    def _forked(self, job: Job, tree: Path) -> JobReport:
        tree.with_suffix(".jsonl").write_bytes(b"")
        process = self._context.Process(target=run, args=(job, tree))
        process.start()
        if self._stopped:  # the stop may have missed this process
            process.kill()
        process.join(job.limit_s)
        late = process.is_alive()
        process.kill()
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its children
        process.join()
        if self._stopped:
            raise RuntimeError("the run was stopped: the job's outcome is unknown")
        return heard(tree, late, process.exitcode or 0)


def heard(tree: Path, late: bool, code: int) -> JobReport:
    """Reads a job's report. A unit that hung or killed its process has failed."""
    out = JobReport()
    report = tree.with_suffix(".jsonl").read_text(encoding="utf-8")
    whole, _, _ = report.rpartition("\n")  # the last line may be cut short
    for message in map(json.loads, whole.splitlines()):
        if "name" in message:
            out.units[message["name"]] = message
        else:
            out.reached[message["reached"]] = message["lines"]
    if late:
        out.end = "late"
    elif code == HUNG:
        out.end = "hangs: exceeded its time limit"
    elif code:
        out.end = f"the process died (exit code {code})"  # a negative code is a signal
    for unit in [name for name, told in out.units.items() if told["outcome"] == "running"]:
        told = out.units.pop(unit)
        if not late:
            out.units[unit] = {**told, "outcome": "failed", "detail": out.end or "no end"}
    return out


def run(job: Job, tree: Path) -> None:
    """The job's process: runs the units in a tree, reports beside it, exits by os._exit."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests interrupt themselves
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] == "lockstep"]:
        del sys.modules[name]
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "LOCKSTEP_REVERT": ""}
    os.environ["XDG_CACHE_HOME"] = str(tree.with_suffix(".kernels"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import pytest
    from coverage import Coverage
    from hypothesis import Phase, settings

    # the same examples every time, no deadlines, no shrinking: any failure is a kill
    unshrunk = (Phase.explicit, Phase.generate)
    settings.register_profile("mutate", settings.get_profile("ci"), phases=unshrunk)
    settings.load_profile("mutate")
    include = [f"{tree}/lockstep/*"]
    measure = Coverage(data_file=None, include=include, config_file=False) if job.measure else None
    # matching hundreds of node ids is slower than collecting their files
    paths = dict.fromkeys(map(file_of, job.units))
    with tree.with_suffix(".jsonl").open("w", encoding="utf-8") as stream:
        watch = Watch(job, stream, log, measure)
        pytest.main([*TABLE["pytest"], *paths], plugins=[watch])
        if measure is not None:
            measure.stop()
            for unit, lines in reached(measure, tree).items():
                watch.send(reached=unit, lines=lines)
    os._exit(0)


class Watch:
    """The pytest plugin of a job: selects and orders its units and reports their outcomes and
    coverage as JSON lines. Ends the process when a unit takes too long."""

    def __init__(self, job: Job, stream: TextIO, log: int, measure: Any) -> None:
        self.job, self.stream, self.log, self.measure = job, stream, log, measure
        self.broken: dict[str, str] = {}  # test files that cannot be imported, with the error
        self.reports: list[Any] = []  # of the running unit
        if measure is not None:
            measure.start()
        self.wait_for("")

    def send(self, **message: Any) -> None:
        print(json.dumps(message), file=self.stream, flush=True)

    def wait_for(self, unit: str) -> None:
        """Sets the unit's deadline ("": between units). Past it the process logs and exits."""
        faulthandler.dump_traceback_later(self.job.unit_s(unit), exit=True, file=self.log)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken[report.nodeid] = last_line(str(report.longrepr))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keeps the job's units, in its order. If a test file is broken, its tests have failed."""
        found: dict[str, list[Any]] = {}
        for item in items:
            found.setdefault(item.nodeid, []).append(item)
            found.setdefault(file_of(item.nodeid), []).append(item)
        items[:] = [item for unit in self.job.units for item in found.get(unit, ())]
        for unit in self.job.units:
            if file_of(unit) in self.broken:
                self.finished(unit, "failed", detail=self.broken[file_of(unit)])
            elif unit not in found:
                self.finished(unit, "gone")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reports = []
        if self.measure is not None:
            if sys.gettrace() is None:  # a test replaced coverage's trace function
                self.measure.stop()
                self.measure.start()
            self.measure.switch_context(nodeid)
        self.finished(nodeid, "running")  # if nothing follows, it died
        self.wait_for(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A unit is set up, called and torn down; it has failed if any of these has."""
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
        self.wait_for("")

    def finished(self, unit: str, outcome: str, seconds: float = 0.0, detail: str = "") -> None:
        """Reports a unit's outcome; exits after a failure if the job stops at the first."""
        self.send(name=unit, outcome=outcome, seconds=seconds, detail=detail)
        if outcome == "failed" and self.job.stop:
            os._exit(0)


def last_line(text: str) -> str:
    """Returns an error's message without its traceback: pytest marks these lines with E."""
    lines = [line for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or ["failed"])[0][:300]


def reached(measure: Any, tree: Path) -> dict[str, dict[str, list[int]]]:
    """Returns unit → file → lines. "" has what ran outside of units: imports."""
    data = measure.get_data()
    out: dict[str, dict[str, list[int]]] = {}
    for name in sorted(data.measured_files()):
        short = str(Path(name).relative_to(tree))
        for line, units in sorted(data.contexts_by_lineno(name).items()):
            for unit in units:
                out.setdefault(unit, {}).setdefault(short, []).append(line)
    return out
