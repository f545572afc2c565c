"""Jobs in processes of their own, each in a copy of the repository of its own: nothing of the
repository itself is ever changed.

A work folder holds one `template` and one tree per worker, made anew from the template for every
other change, always under the same path: Numba keeps compiled code by the path and the time stamp
of its source, so a text that is not mutated is never compiled again, and what a mutant compiles
dies with its tree. A process is forked from one that has imported what is slow but not Lockstep
(multiprocessing's forkserver) and runs `trial`. Knows units and files and nothing of mutants.
`reach` and `campaign` call it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from queue import LifoQueue
from typing import Any, TypeVar

from lockstep.lab.mutate.trial import KERNELS, Job, run
from lockstep.types import RuleError

OWN = ("lockstep/lab/mutate/", "tests/test_mutate.py")
WARM = (
    *("numpy", "torch", "numba", "safetensors.torch", "tokenizers", "hypothesis", "coverage"),
    "transformers.models.llama.modeling_llama",
)

Item = TypeVar("Item")
Made = TypeVar("Made")


def repository() -> Path:
    """The checkout that this package was imported from."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "tests").is_dir() or not (root / ".git").exists():
        rule = "mutants are made in a checkout, with its tests"
        raise RuleError(rule, f"{root} without tests/ or .git", "Run it in a clone")
    return root


def listed(root: Path) -> list[str]:
    """Every file that git knows or would take, relative."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    return sorted({name for name in done.stdout.split("\0") if name and (root / name).is_file()})


def digests(root: Path) -> dict[str, str]:
    """Of every Python file of package and tests but these tools, and of what configures them."""
    found = [n for n in listed(root) if n.startswith(("lockstep/", "tests/")) and n.endswith(".py")]
    named = [n for n in found if not n.startswith(OWN)]
    return {name: digest((root / name).read_bytes()) for name in [*named, "pyproject.toml"]}


def digest(content: bytes) -> str:
    """Short, for comparing and naming."""
    return hashlib.sha256(content).hexdigest()[:16]


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
    for message in map(json.loads, whole.splitlines()):
        if "name" in message:
            heard.units[message["name"]] = message
        elif "reached" in message:
            heard.reached[message["reached"]] = message["lines"]
        else:
            running = message
    unit, took = running["running"], time.monotonic() - running["at"]
    if late:
        heard.end = "late"
    elif code == 1 and took >= running["limit_s"]:
        heard.end = f"hangs: no end after {took:.0f} s"
    elif code or unit:
        heard.end = f"the process was ended ({f'signal {-code}' if code < 0 else f'code {code}'})"
    if unit and not late:
        failed = {"outcome": "failed", "seconds": took, "detail": heard.end}
        heard.units.setdefault(unit, {"name": unit, **failed})
    return heard


class Crew:
    """So many jobs at once, on copies of `root` in a work folder."""

    def __init__(self, root: Path, work: Path, count: int, warm: Sequence[str] = WARM) -> None:
        self.root, self.work, self.count = root, work, count
        self.template = work / "template"
        self._renew()
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(warm))
        self._planted: dict[int, Mapping[str, str]] = {}
        self._stopped = False
        self._idle: LifoQueue[int] = LifoQueue()
        for worker in reversed(range(count)):
            self._idle.put(worker)

    def map(self, function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
        """What `function`, which runs jobs, makes of each item; an error ends them all."""
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
            tree, compiled = (self.work / f"{name}{worker}" for name in ("tree", "compiled"))
            if self._planted.pop(worker, None) != job.changes:
                self._plant(tree, compiled, job.changes)
            heard = self._forked(job, tree)
            self._planted[worker] = dict(job.changes)
            made = [p for p in tree.rglob("*") if p.is_file()] if job.keep else []
            for path in made:  # what an unchanged tree has compiled is there when planted again
                name = path.relative_to(tree)
                if KERNELS in name.parts or path.suffix in (".nbi", ".nbc"):
                    (compiled / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, compiled / name)
            return heard
        finally:
            self._idle.put(worker)

    def _renew(self) -> None:
        """Makes the template equal to the repository, its time stamps included."""
        names = listed(self.root)
        for name in names:
            there, here = self.template / name, self.root / name
            if not there.is_file() or there.read_bytes() != here.read_bytes():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(here, there)
        kept = {self.template / name for name in names}
        for path in [p for p in self.template.rglob("*") if p.is_file()]:
            if path not in kept and not {"__pycache__", KERNELS} & set(path.parts):
                path.unlink()

    def _plant(self, tree: Path, compiled: Path, changes: Mapping[str, str]) -> None:
        """A fresh tree in which the named files have other texts."""
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(self.template, tree)
        if compiled.is_dir():
            shutil.copytree(compiled, tree, dirs_exist_ok=True)
        for name, text in changes.items():
            (tree / name).write_text(text, encoding="utf-8")

    def _forked(self, job: Job, tree: Path) -> Heard:
        report = tree.with_suffix(".jsonl")
        report.write_bytes(b"")
        process = self._context.Process(target=run, args=(job, tree))
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
        return read(report, late, process.exitcode or 0)
