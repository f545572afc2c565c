"""The warm servers of `serve` from outside: one per worker, each with a tree of its own.

`Server.run` yields what happens to a job; it knows units and trees and nothing of mutants. `reach`
and `campaign` call it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import LifoQueue
from typing import Any

from lockstep.lab.mutate.tree import Trees

WARM = (
    "numpy",
    "torch",
    "numba",
    "safetensors.torch",
    "tokenizers",
    "transformers.models.llama.modeling_llama",
    "hypothesis",
    "coverage",
)
HANG_S = 20.0  # a unit that takes this much longer than ten times its time hangs
HANG_FACTOR = 10.0
UNKNOWN_S = 600.0  # the limit of a unit whose time is not known
START_S = 120.0  # from the fork to the first unit, and between two


@dataclass(frozen=True)
class Job:
    """Units to run in one tree, and how."""

    units: Sequence[str] = ()
    files: Sequence[str] = ()  # test files to run as a whole
    changes: Mapping[str, str] = field(default_factory=dict)  # file → text
    seconds: Mapping[str, float] = field(default_factory=dict)  # what a unit took without a mutant
    stop: bool = True  # at the first failure
    measure: bool = False  # coverage
    limit_s: float = 0.0  # of the whole job; 0 is none
    hang_s: float = HANG_S


class Server:
    """One process of `serve`."""

    def __init__(self, trees: Trees, worker: int, warm: Sequence[str] = WARM) -> None:
        self.trees, self.worker = trees, worker
        self.planted: Mapping[str, str] | None = None
        self.log = trees.work / f"worker{worker}.log"
        script = Path(__file__).with_name("serve.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), *warm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=trees.work,
        )
        list(self._messages())  # it says when it is ready

    def run(self, job: Job) -> Iterator[dict[str, Any]]:
        """Runs a job in a tree with its changes; one that has them stays. The last message is
        `end`."""
        tree = self.trees.path(self.worker)
        if self.planted != job.changes:
            self.planted = None
            self.trees.plant(self.worker, job.changes)
            self.planted = dict(job.changes)
        known = [u for u in job.units if u in job.seconds]
        limits = {u: job.hang_s + HANG_FACTOR * job.seconds[u] for u in known}
        limits[""] = UNKNOWN_S if job.measure else START_S
        order = {
            "units": list(job.units),
            "files": list(job.files),
            "tree": str(tree),
            "environment": self.trees.environment(tree),
            "log": str(self.log),
            "stop": job.stop,
            "measure": job.measure,
            "limit_s": job.limit_s,
            "limits_s": limits,
            "unit_s": UNKNOWN_S,
        }
        self.log.write_bytes(b"")
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        yield from self._messages()

    def _messages(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            yield message
            if "end" in message:
                return
        code = self.process.wait()
        raise RuntimeError(f"the server of worker {self.worker} ended with {code}; see {self.log}")

    def close(self) -> None:
        """Ends it, and with it the child it may have."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Crew:
    """So many servers, each started when it is first needed."""

    def __init__(self, trees: Trees, count: int, warm: Sequence[str] = WARM) -> None:
        self.trees, self.count, self.warm = trees, count, warm
        self._idle: LifoQueue[Server | int] = LifoQueue()
        for worker in reversed(range(count)):
            self._idle.put(worker)

    @contextmanager
    def borrow(self) -> Iterator[Server]:
        """A server that nobody else uses meanwhile."""
        found = self._idle.get()
        try:
            if isinstance(found, int):
                found = Server(self.trees, found, self.warm)
            yield found
        finally:
            self._idle.put(found)

    def close(self) -> None:
        """Ends those that were started; nobody uses one any more."""
        for _ in range(self.count):
            found = self._idle.get()
            if isinstance(found, Server):
                found.close()
