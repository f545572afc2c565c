"""Jobs in processes of their own, each in a copy of the repository: the repository never changes.

A work folder holds one `template` and one tree per worker, made anew from the template for every
other change, always under the same path: Numba keeps compiled code by the path and the time stamp
of its source, so a text that is not mutated is never compiled again, and what a mutant compiles
dies with its tree. Knows units and files and nothing of mutants. `reach` and `campaign` call it.
"""

import hashlib
import json
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
    return hashlib.sha256(content).hexdigest()[:16]


@dataclass
class Heard:
    """What came of a job."""

    units: dict[str, dict[str, Any]] = field(default_factory=dict)  # outcome, seconds, detail
    reached: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # unit → file → lines
    end: str = "done"  # or late, or what ended the process


def read(report: Path, job: Job, late: bool, code: int) -> Heard:
    """A report. A unit that hung or took the process along has failed."""
    heard, running = Heard(), ""
    whole, _, _ = report.read_text(encoding="utf-8").rpartition("\n")  # the last may be cut short
    for message in map(json.loads, whole.splitlines()):
        if "name" in message:
            heard.units[message["name"]] = message
        elif "reached" in message:
            heard.reached[message["reached"]] = message["lines"]
        else:
            running = message["running"]
    if late:
        heard.end = "late"
        return heard
    if code == 1 and running:
        heard.end = f"hangs: no end after {job.unit_s(running):.0f} s"
    elif code or running:
        heard.end = f"the process was ended ({f'signal {-code}' if code < 0 else f'code {code}'})"
    if running and running not in heard.units:
        failed = {"outcome": "failed", "seconds": 0.0, "detail": heard.end}
        heard.units[running] = {"name": running, **failed}
    return heard


class Crew:
    """So many jobs at once, on copies of `root` in a work folder."""

    def __init__(self, root: Path, work: Path, count: int, warm: Sequence[str] = WARM) -> None:
        self.count, self.template = count, work / "template"
        shutil.rmtree(self.template, ignore_errors=True)
        for name in listed(root):
            (self.template / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, self.template / name)
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(warm))
        self._planted: dict[Path, Mapping[str, str]] = {}
        self._stopped = False
        self._idle: LifoQueue[Path] = LifoQueue()
        for worker in reversed(range(count)):
            self._idle.put(work / f"tree{worker}")

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
        tree = self._idle.get()
        compiled = tree.with_suffix(".compiled")
        try:
            if self._planted.pop(tree, None) != job.changes:
                shutil.rmtree(tree, ignore_errors=True)
                for source in (self.template, compiled):
                    if source.is_dir():
                        shutil.copytree(source, tree, dirs_exist_ok=True)
                for name, text in job.changes.items():
                    (tree / name).write_text(text, encoding="utf-8")
            heard = self._forked(job, tree)
            self._planted[tree] = dict(job.changes)
            made = [p for p in tree.rglob("*") if p.is_file()] if job.keep else []
            for path in made:  # what an unchanged tree has compiled is there when planted again
                there = compiled / path.relative_to(tree)
                if KERNELS in there.parts or there.suffix in (".nbi", ".nbc"):
                    there.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, there)
            return heard
        finally:
            self._idle.put(tree)

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
        return read(report, job, late, process.exitcode or 0)
