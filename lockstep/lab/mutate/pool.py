"""Jobs in processes of their own, each in a tree of its own: what came of every unit.

A process is forked from one that has imported what is slow but not Lockstep (multiprocessing's
forkserver) and runs `trial`; it leads a process group, which is ended with it. Knows units and
trees and nothing of mutants. `reach` and `campaign` call it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from queue import LifoQueue
from typing import Any, TypeVar

from lockstep.lab.mutate import trial
from lockstep.lab.mutate.tree import Trees

WARM = (
    *("numpy", "torch", "numba", "safetensors.torch", "tokenizers", "hypothesis", "coverage"),
    "transformers.models.llama.modeling_llama",
)
HANG_S = 20.0  # a unit that takes this much longer than ten times its time hangs
HANG_FACTOR = 10.0
UNKNOWN_S = 600.0  # the limit of a unit whose time is not known
START_S = 120.0  # from the fork to the first unit, and between two

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Job:
    """Units to run in one tree, and how."""

    units: Sequence[str] = ()
    files: Sequence[str] = ()  # test files to run as a whole
    changes: Mapping[str, str] = field(default_factory=dict)  # file → text
    seconds: Mapping[str, float] = field(default_factory=dict)  # what a unit took without a mutant
    stop: bool = True  # at the first failure
    measure: bool = False  # coverage
    keep: bool = False  # what was compiled is there for the next job
    limit_s: float = float("inf")  # of the whole job
    hang_s: float = HANG_S


@dataclass
class Heard:
    """What came of a job: of each unit its outcome, seconds and detail, and the lines it reached.
    `end` is done, late, or what ended the process."""

    units: dict[str, dict[str, Any]] = field(default_factory=dict)
    reached: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    end: str = "done"

    def verdicts(self) -> dict[str, str]:
        """Unit → "" if it is green, or what it said. A test that is no more says nothing."""
        return {
            name: (told["detail"] or "failed") if told["outcome"] == "failed" else ""
            for name, told in self.units.items()
        }


def read(report: Path, late: bool, code: int) -> Heard:
    """A report. A unit that hung or took the process along has failed."""
    heard, running = Heard(), {"running": "", "limit_s": 0.0, "at": 0.0}
    for line in report.read_text(encoding="utf-8").splitlines():
        message = json.loads(line)
        if "unit" in message:
            heard.units[message["unit"]] = message
        elif "reached" in message:
            heard.reached[message["reached"]] = message["lines"]
        else:
            running = message
    took = time.monotonic() - running["at"]
    if late:
        heard.end = "late"
    elif code == 1 and took >= running["limit_s"]:
        heard.end = f"hangs: no end after {took:.0f} s"
    elif code or running["running"]:
        heard.end = f"the process was ended ({f'signal {-code}' if code < 0 else f'code {code}'})"
    if running["running"] and heard.end not in ("done", "late"):
        failed = {"outcome": "failed", "seconds": took, "detail": heard.end}
        heard.units.setdefault(running["running"], failed)
    return heard


class Crew:
    """So many jobs at once."""

    def __init__(self, trees: Trees, count: int, warm: Sequence[str] = WARM) -> None:
        self.trees, self.count = trees, count
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(warm))
        self._planted: dict[int, Mapping[str, str]] = {}
        self._stopped = False
        self._idle: LifoQueue[int] = LifoQueue()
        for worker in reversed(range(count)):
            self._idle.put(worker)

    def map(self, function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
        """What `function`, which runs jobs, makes of each item, in order; an error ends them
        all."""
        with ThreadPoolExecutor(self.count) as pool:
            try:
                yield from pool.map(function, items)
            except BaseException:
                self._stopped = True
                raise

    def run(self, job: Job) -> Heard:
        """Runs a job in a tree with its changes; one that has them stays."""
        worker = self._idle.get()
        try:
            if self._planted.pop(worker, None) != job.changes:
                self.trees.plant(worker, job.changes)
            heard = self._forked(job, worker)
            self._planted[worker] = dict(job.changes)
            if job.keep:
                self.trees.keep_compiled(worker)
            return heard
        finally:
            self._idle.put(worker)

    def _forked(self, job: Job, worker: int) -> Heard:
        tree, report = self.trees.path(worker), self.trees.work / f"worker{worker}.jsonl"
        known = [u for u in job.units if u in job.seconds]
        limits = {u: job.hang_s + HANG_FACTOR * job.seconds[u] for u in known}
        order = trial.Order(
            units=job.units,
            files=job.files,
            stop=job.stop,
            measure=job.measure,
            limits_s={**limits, "": UNKNOWN_S if job.measure else START_S},
            unit_s=UNKNOWN_S,
            tree=str(tree),
            environment=self.trees.environment(tree),
            log=str(self.trees.work / f"worker{worker}.log"),
            report=str(report),
        )
        report.write_bytes(b"")
        process = self._context.Process(target=trial.run, args=(order,))
        end = time.monotonic() + job.limit_s
        process.start()
        try:
            while process.is_alive() and time.monotonic() < end and not self._stopped:
                process.join(0.5)
            late = process.is_alive()
        finally:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
            process.kill()
            process.join()
        return read(report, late, process.exitcode or 0)
