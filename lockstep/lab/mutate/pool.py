"""Jobs in processes of their own, each in a tree of its own: what came of every unit.

A process is forked from one that has imported what is slow but not Lockstep (multiprocessing's
forkserver) and runs `trial`; it leads a process group, which is ended with it. Knows units and
trees and nothing of mutants. `reach` and `campaign` call it.
"""

from __future__ import annotations

import json
import math
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

from lockstep.lab.mutate.tree import Trees
from lockstep.lab.mutate.trial import Job, run

WARM = (
    *("numpy", "torch", "numba", "safetensors.torch", "tokenizers", "hypothesis", "coverage"),
    "transformers.models.llama.modeling_llama",
)

Item = TypeVar("Item")
Made = TypeVar("Made")


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
    heard = Heard()
    running: dict[str, Any] = {"running": "", "limit_s": math.inf, "at": 0.0}
    whole, _, _ = report.read_text(encoding="utf-8").rpartition("\n")  # the last may be cut short
    for line in whole.splitlines():
        message = json.loads(line)
        if "name" in message:
            heard.units[message["name"]] = message
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
        heard.units.setdefault(running["running"], {"name": running["running"], **failed})
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
        place = self.trees.place(worker)
        place.report.write_bytes(b"")
        process = self._context.Process(target=run, args=(job, place))
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
        if self._stopped:
            raise RuntimeError("the run was ended: what this job came to is not known")
        return read(place.report, late, process.exitcode or 0)
