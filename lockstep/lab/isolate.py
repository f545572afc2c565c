"""Processes that take jobs and may die: what happens in one cannot take the run down.

A job is an argument of one module-level function. Each process is spawned, reads jobs from a pipe
and answers; one that dies, or takes longer than allowed and is killed, is an answer too (`Died`),
and a fresh one takes its place. A bug named by LOCKSTEP_REVERT is put back in every process. Knows
nothing of cells; `cells` calls it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep.types import RuleError

WAITING = (
    "OMP_WAIT_POLICY",
    "PASSIVE",
)  # for threads that wait: several processes whose threads spin are fifty times slower
START_S = 300.0  # a process has this long to import everything before its first job counts


@dataclass(frozen=True)
class Died:
    """The process that had the job is gone; `why` in words."""

    why: str


@dataclass(frozen=True)
class Raised:
    """The function itself raised: an error of the lab, not of what it judges."""

    error: Exception
    trace: str


class Worker:
    """One process and what it is working on."""

    def __init__(self, function: Callable[[Any], Any], share: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function, share), daemon=True)
        with _patient_threads():
            self.process.start()
        theirs.close()
        self.job: Any = None
        self.busy, self.ready = False, False
        self.deadline = time.monotonic() + START_S
        self.limit_s = START_S

    def give(self, job: Any, limit_s: float) -> None:
        """Sends a job; the clock starts when the process is ready for it."""
        self.job, self.busy, self.limit_s = job, True, limit_s
        if self.ready:
            self.deadline = time.monotonic() + limit_s
        with contextlib.suppress(BrokenPipeError):  # it died while idle: `take` will say so
            self.pipe.send(job)

    def take(self) -> Any:
        """What the process has to say: None for "ready", an answer, or Died."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return Died(_exit(self.process.exitcode))
        if not self.ready:
            self.ready, self.deadline = True, time.monotonic() + self.limit_s
            return None
        self.busy = False
        return message

    def stop(self) -> None:
        """Ends the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(
    function: Callable[[Any], Any],
    jobs: Sequence[Any],
    workers: int,
    limit_s: Callable[[Any], float],
) -> Iterator[tuple[Any, Any]]:
    """(job, answer or Died) as they come. `limit_s(job)`: how long a job may take before its
    process is killed."""
    waiting = list(reversed(jobs))
    workers = min(workers, len(waiting))
    share = max(1, (os.cpu_count() or 1) // max(workers, 1))
    crew: list[Worker] = []
    try:
        while waiting or any(w.busy for w in crew):
            crew += [
                Worker(function, share)
                for _ in range(min(workers, len(waiting) + sum(w.busy for w in crew)) - len(crew))
            ]
            for worker in (w for w in crew if not w.busy and waiting):
                job = waiting.pop()
                worker.give(job, limit_s(job))
            for worker, answer in _listen(crew):
                if isinstance(answer, Died):
                    worker.stop()
                    crew.remove(worker)
                if isinstance(answer, Raised):
                    answer.error.add_note(answer.trace)
                    raise answer.error
                yield worker.job, answer
    finally:
        for worker in crew:
            worker.stop()


@contextlib.contextmanager
def _patient_threads() -> Iterator[None]:
    """Threads of a process started inside sleep while they wait, unless the user has said
    otherwise."""
    name, value = WAITING
    before = os.environ.get(name)
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _listen(crew: list[Worker]) -> list[tuple[Worker, Any]]:
    """Waits until somebody answers, dies or is out of time."""
    until = min(w.deadline for w in crew if w.busy)
    heard = wait([w.pipe for w in crew if w.busy], max(0.0, until - time.monotonic()))
    said = [(w, w.take()) for w in crew if w.pipe in heard]
    late = [w for w in crew if w.busy and w.pipe not in heard and time.monotonic() >= w.deadline]
    return [(w, a) for w, a in said if a is not None] + [
        (w, Died(f"no answer within {w.limit_s:.0f} s")) for w in late
    ]


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with code {code}"


def _serve(pipe: Connection[Any, Any], function: Callable[[Any], Any], share: int) -> None:
    """The life of a process: put the asked-for bug back, if any, then answer jobs until the pipe
    closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    import torch

    from lockstep.lab import reverts

    torch.set_num_threads(share)
    with reverts.from_environment():
        pipe.send("ready")
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            try:
                answer = function(job)
            except Exception as error:  # only rules are sure to survive the pipe
                kept = (
                    error
                    if isinstance(error, RuleError)
                    else RuntimeError(f"{type(error).__name__}: {error}")
                )
                answer = Raised(kept, traceback.format_exc())
            pipe.send(answer)
