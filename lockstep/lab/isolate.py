"""Worker processes that may die: a crash in one does not end the run.

A job is an argument of one module-level function. A job that kills its process, or exceeds its time
limit and is killed, has an answer too (`Died`), and a fresh process replaces its own. This module
knows nothing of cells.
"""

import atexit
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

# waiting threads sleep: with several processes, spinning threads are fifty times slower
WAITING = ("OMP_WAIT_POLICY", "PASSIVE")


@dataclass(frozen=True)
class Died:
    """The process that ran the job is gone: the reason in words, and its exit code."""

    reason: str
    code: int = 0


def run(
    work: Callable[[Any], Any], jobs: Sequence[Any], workers: int, limit_s: Callable[[Any], float]
) -> Iterator[tuple[Any, Any]]:
    """Yields (job, answer or Died) as they complete. `limit_s(job)` is how long a job may take
    before its process is killed. An exception of `work` is raised here: an error of the lab."""
    from pebble import ProcessExpired, ProcessPool  # in the extra `lab`; nothing else needs it

    workers = max(1, min(workers, len(jobs)))
    threads = max(1, (os.cpu_count() or 1) // workers)
    before = os.environ.get(WAITING[0])
    os.environ.setdefault(*WAITING)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPool(workers, initializer=_begin, initargs=(threads,), context=spawn)
    try:
        todo = {pool.schedule(work, args=(job,), timeout=limit_s(job)): job for job in jobs}
        for done in as_completed(todo):
            job = todo[done]  # type: ignore[index]
            try:
                answer = done.result()
            except TimeoutError:
                answer = Died(f"no answer within {limit_s(job):.0f} s")
            except ProcessExpired as error:
                code = int(error.exitcode or 0)
                how = f"exited with code {code}"
                if code < 0:
                    how = f"was killed by {signal.Signals(-code).name}"
                answer = Died(f"the process {how}", max(code, 0))
            yield job, answer
    finally:
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()
        if before is None:
            del os.environ[WAITING[0]]


def _begin(threads: int) -> None:
    """Initializes a worker process; the requested bug, if any, is put back for its whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    import torch

    from lockstep.lab import reverts

    torch.set_num_threads(threads)
    stack = ExitStack()
    stack.enter_context(reverts.from_environment())
    atexit.register(stack.close)
