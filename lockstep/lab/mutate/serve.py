"""A process that has imported what is slow, but not Lockstep, and forks one child for every job.

Run as a script, never as a part of the package: a child must import Lockstep from the tree of its
job, so nothing here may import it first. A job is tests and cells of one tree: one line of JSON on
stdin; what happens to it are lines of JSON on stdout, the last of them has the key `end`. A child
leads a process group of its own, and the whole group is ended when a unit, or the job, takes longer
than it may. `pool` starts it.

A unit is a test by its node id, or `cell:backend/recipe/feature`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

CELL = "cell:"

Message = dict[str, Any]


class Report:
    """Lines of JSON from the child to the server."""

    def __init__(self, fd: int) -> None:
        self.stream = os.fdopen(fd, "w", encoding="utf-8")

    def send(self, **message: Any) -> None:
        """One line, at once."""
        self.stream.write(json.dumps(message) + "\n")
        self.stream.flush()


class Watch:
    """The pytest plugin of a child: what runs, in which order, what it came to, what it reached."""

    def __init__(self, job: dict[str, Any], report: Report, measure: Any) -> None:
        self.report, self.measure = report, measure
        self.units: list[str] = job["units"]
        self.stop: bool = job["stop"]
        self.whole = set(job.get("files", ()))  # test files of which every test runs
        self.broken: set[str] = set()  # test files that cannot be imported
        self.seconds = 0.0
        self.failed, self.skipped, self.detail = False, False, ""

    def pytest_collection(self, session: Any) -> bool:
        """Only what was asked for, in that order; cells are items like any other."""
        session.items = []
        if any(not u.startswith(CELL) for u in self.units) or self.whole:
            session.perform_collect()
        found = {item.nodeid: item for item in session.items}
        wanted = [n for n in found if n.partition("::")[0] in self.whole]
        for unit in self.units:
            if unit.startswith(CELL):
                found[unit] = cell_item(session, unit)
            if unit in found:
                wanted.append(unit)
        gone = [u for u in self.units if u not in found and u.partition("::")[0] not in self.broken]
        self.report.send(gone=gone)
        session.items = [found[unit] for unit in wanted]
        session.testscollected = len(session.items)
        return True

    def pytest_collectreport(self, report: Any) -> None:
        """A test file that cannot be imported has failed."""
        if report.failed:
            self.broken.add(report.nodeid)
            detail = last_line(str(report.longrepr))
            self.report.send(unit=report.nodeid, outcome="failed", seconds=0.0, detail=detail)
            if self.stop:
                os._exit(0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """The server's clock of this unit starts."""
        self.seconds, self.failed, self.skipped, self.detail = 0.0, False, False, ""
        if self.measure is not None:
            if sys.gettrace() is None:  # a test had a trace function of its own
                self.measure.stop()
                self.measure.start()
            self.measure.switch_context(nodeid)
        self.report.send(start=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A unit is set up, called and torn down; it has failed when any of these has."""
        self.seconds += report.duration
        self.skipped |= report.skipped
        if report.failed:
            self.failed = True
            self.detail = self.detail or last_line(str(report.longrepr))
        if report.when != "teardown":
            return
        if self.measure is not None:
            self.measure.switch_context("")
        outcome = "failed" if self.failed else "skipped" if self.skipped else "passed"
        seconds = round(self.seconds, 4)
        self.report.send(unit=report.nodeid, outcome=outcome, seconds=seconds, detail=self.detail)
        if self.failed and self.stop:
            os._exit(0)


def cell_item(session: Any, unit: str) -> Any:
    """A cell of the lab as an item of pytest."""
    import pytest

    class CellItem(pytest.Item):
        """Judged in this process, known failures as the lab has them."""

        def runtest(self) -> None:
            """Fails with the reason of the cell."""
            from lockstep.lab import cells, known

            cell = cells.Cell.parse(self.name.removeprefix(CELL))
            result = known.settle(cells.run_cell(cell), False)
            if result.verdict == "refused":
                pytest.skip(result.reason)
            if result.verdict == "failed":
                pytest.fail(result.reason, pytrace=False)

        def reportinfo(self) -> tuple[Path, None, str]:
            """Where pytest says it is."""
            return Path(self.name), None, self.name

    return CellItem.from_parent(session, name=unit, nodeid=unit)


def last_line(text: str) -> str:
    """What an error says, without where: pytest marks these lines with E."""
    lines = [line for line in text.splitlines() if line.strip()]
    told = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (told or lines or [""])[0][:300]


def trial(job: dict[str, Any], fd: int) -> None:
    """The child: runs the units of a job and reports them; leaves by os._exit."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests interrupt themselves
    tree = job["tree"]
    os.chdir(tree)
    sys.path.insert(0, tree)
    os.environ.update(job["environment"])
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=log)  # where does it hang? the log says
    report = Report(fd)
    measure = measurement(tree) if job.get("measure") else None
    quiet_hypothesis()
    import pytest

    tests = [u.partition("::")[0] for u in job["units"] if not u.startswith(CELL)]
    paths = list(dict.fromkeys([*job.get("files", ()), *tests]))
    # hundreds of node ids are slower to match than their files are to collect
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "--hypothesis-seed=0",
    ]
    code = pytest.main([*options, *paths], plugins=[Watch(job, report, measure)])
    if measure is not None:
        measure.stop()
        for unit, lines in reached(measure, tree).items():
            report.send(reached=unit, lines=lines)
    report.send(code=int(code))
    os._exit(0)


def measurement(tree: str) -> Any:
    """Coverage of the tree's package, in memory; the context is the unit that runs."""
    import coverage

    measure = coverage.Coverage(data_file=None, include=[f"{tree}/lockstep/*"], config_file=False)
    measure.start()
    return measure


def reached(measure: Any, tree: str) -> dict[str, dict[str, list[int]]]:
    """Unit → file → lines. "" has what ran outside of units: imports."""
    data = measure.get_data()
    out: dict[str, dict[str, list[int]]] = {}
    for name in sorted(data.measured_files()):
        short = str(Path(name).relative_to(tree))
        for line, units in sorted(data.contexts_by_lineno(name).items()):
            for unit in units:
                out.setdefault(unit, {}).setdefault(short, []).append(line)
    return out


def quiet_hypothesis() -> None:
    """The same examples every time, no deadlines, no shrinking: any failure is a kill."""
    from hypothesis import HealthCheck, Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutate",
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutate")


def serve() -> None:
    """Jobs from stdin until it closes."""
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints is not the protocol
    print(json.dumps({"end": "ready"}), file=out, flush=True)
    lines = Lines(0)
    while (text := lines.next(None)) is not None:
        for message in run(json.loads(text), lines):
            print(json.dumps(message), file=out, flush=True)


class Lines:
    """Lines of a file descriptor that can also be waited for."""

    def __init__(self, fd: int) -> None:
        self.fd, self.rest, self.open = fd, b"", True

    def next(self, timeout_s: float | None) -> str | None:
        """The next line, or None at the end. TimeoutError when there is none in time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self.rest:
            if not self.open:
                return None
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self.fd], [], [], left)[0]:
                raise TimeoutError
            part = os.read(self.fd, 1 << 16)
            self.open = bool(part)
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode()

    def closed(self) -> bool:
        """Whether the other side has gone: there is something to read, and it is the end."""
        if self.open and select.select([self.fd], [], [], 0)[0]:
            part = os.read(self.fd, 1 << 16)
            self.open = bool(part)
            self.rest += part
        return not self.open


def run(job: dict[str, Any], orders: Lines) -> Iterator[dict[str, Any]]:
    """Forks a child for a job; its messages as they come, then `end` with what became of it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            trial(job, writing)
        finally:
            os._exit(3)
    os.close(writing)
    try:
        end = yield from watched(job, Lines(reading), orders)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # grandchildren too
        os.close(reading)
        status = os.waitpid(child, 0)[1]
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    yield {**end, "signal": ended} if end["end"] == "done" else end


def watched(job: Message, lines: Lines, orders: Lines) -> Generator[Message, None, Message]:
    """The messages of a child until it has no more to say, or too much time has passed; returns how
    it ended."""
    begin = since = time.monotonic()
    unit = ""
    while (end := overdue(job, unit, begin, since, orders)) is None:
        try:
            text = lines.next(0.5)
        except TimeoutError:
            continue
        if text is None:
            return {"end": "done", "running": unit}
        message = json.loads(text)
        if "start" in message or "unit" in message:
            unit, since = message.get("start", ""), time.monotonic()
        yield message
    return end


def overdue(job: Message, unit: str, begin: float, since: float, orders: Lines) -> Message | None:
    """`hang` when a unit is far beyond its time, `late` when the job is, None while all is well."""
    now = time.monotonic()
    limit = job["limits_s"].get(unit, job["unit_s"])
    if orders.closed():
        return {"end": "late", "running": unit}
    if now - since > limit:
        return {"end": "hang", "running": unit, "seconds": round(now - since, 1)}
    if job["limit_s"] and now - begin > job["limit_s"]:
        return {"end": "late", "running": unit}
    return None


if __name__ == "__main__":
    serve()
