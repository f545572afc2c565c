"""`lockstep bench compare`: this tree against an older commit of it, taking turns in one run.

Two processes, one per source tree, measure the same case by turns, so that what the machine does to
one it does to the other. The ratio is old time over new time: above 1 the new tree is faster. Times
of loading are compared by their difference. Knows processes and medians; what is measured is
written in `contender`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

import torch

from lockstep.bench import contender
from lockstep.bench.attention import cases as attention_cases
from lockstep.bench.machine import QUIET, note, place, tell, wait_for_quiet, watched
from lockstep.lab.document import write
from lockstep.progress import Progress
from lockstep.types import RuleError

ROOT = Path(__file__).parents[2]
LEAST_MEAN, LEAST_EACH = 0.99, 0.95
MODELS = ("builtin", "100m")
SLOWER_S = {"load builtin": 1.0, "load 100m": 3.0}  # loading may take so much longer
TRIES = 3  # a disturbed turn is repeated


@dataclass(frozen=True)
class Compared:
    """One case: seconds of every turn on both sides, start after start, and their ratio."""

    case: str
    old_s: tuple[float, ...]
    new_s: tuple[float, ...]
    undisturbed: bool
    error: str = ""
    starts: int = 1

    @property
    def ratio(self) -> float:
        """Old over new: above 1 is faster than before.

        Of each start the medians, of all starts the geometric mean: what fits the caches by a hair
        is a third slower or faster from start to start, whichever side it is.
        """
        return 0.0 if self.error else geometric_mean(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """Old over new, one per start."""
        turns = len(self.old_s) // self.starts
        bounds = [(at * turns, (at + 1) * turns) for at in range(self.starts)]
        return [
            statistics.median(self.old_s[a:b]) / statistics.median(self.new_s[a:b])
            for a, b in bounds
        ]

    @property
    def slower_s(self) -> float:
        """Seconds that the new side takes longer."""
        return statistics.median(self.new_s) - statistics.median(self.old_s)

    @property
    def met(self) -> bool:
        """Whether the case is as fast as it has to be."""
        if self.error:
            return False
        if self.case in SLOWER_S:
            return self.slower_s <= SLOWER_S[self.case]
        return self.ratio >= LEAST_EACH

    def __str__(self) -> str:
        mark = "ok " if self.met else "LOW"
        if self.error:
            return f"{mark} {self.case:44} {self.error}"
        old, new = statistics.median(self.old_s), statistics.median(self.new_s)
        told = f"{mark} {self.case:44} {old * 1e3:10.3f} -> {new * 1e3:10.3f} ms  x{self.ratio:.3f}"
        return told + ("" if self.undisturbed else "  disturbed")


class Side:
    """A contender's process on one source tree."""

    def __init__(self, tree: Path, folders: dict[str, str]) -> None:
        script = [sys.executable, contender.__file__, json.dumps(folders)]
        self.process = subprocess.Popen(
            script,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )

    def measure(self, case: str, seed: int) -> float:
        """Seconds of one turn; an error of the other side is raised here."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None, "both ends are pipes"
        stdin.write(json.dumps({"case": case, "seed": seed}) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return float(answer["seconds"])

    def cpu_s(self) -> float:
        """CPU seconds of the process and of its children that have ended."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        if not stat.exists():
            return 0.0
        fields = stat.read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def run(args: argparse.Namespace) -> int:
    """Compares; prints a line a case, writes JSON, returns 1 if a case or the mean is too slow."""
    todo = [name for name in names() if not args.case or any(name.startswith(c) for c in args.case)]
    if not todo:
        raise RuleError(
            "--case is the beginning of a case's name", ", ".join(args.case), names()[0]
        )
    with base_tree(args.base) as old_tree, models(todo) as folders:
        runs = [measured(args, todo, (old_tree, ROOT), folders) for _ in range(args.starts)]
    results = [joined(each) for each in zip(*runs, strict=True)]
    document = summary(args.base, results)
    if args.json:
        write(document, args.json)
    if args.json != "-":
        mean, each = document["mean_ratio"], document["least_ratio"]
        print(f"{len(results)} cases: mean x{mean:.3f} (>= {LEAST_MEAN}), least x{each:.3f}")
        slow = [r.case for r in results if not r.met]
        print(f"too slow: {'; '.join(slow)}" if slow else "no case is too slow")
    return 0 if document["met"] else 1


def measured(
    args: argparse.Namespace, todo: Sequence[str], trees: Sequence[Path], folders: dict[str, str]
) -> list[Compared]:
    """Every case with two processes of their own: where memory lies differs from start to start."""
    sides = [Side(tree, folders) for tree in trees]
    try:
        return compare(todo, sides, args.repeat or 5, 1 if args.quick else TRIES)
    finally:
        for side in sides:
            side.close()


def joined(parts: Sequence[Compared]) -> Compared:
    """One case of several starts: all its turns."""
    return Compared(
        case=parts[0].case,
        old_s=tuple(t for part in parts for t in part.old_s),
        new_s=tuple(t for part in parts for t in part.new_s),
        undisturbed=all(part.undisturbed for part in parts),
        error=next((part.error for part in parts if part.error), ""),
        starts=len(parts),
    )


def names() -> list[str]:
    """Every case: the kernels', then the engine's, then loading."""
    kernels = [f"attention {case.name}" for case in attention_cases(False)]
    engine = [f"{k} {m}" for m in MODELS for k in ("decode", "mixed", "prefix", "prefill")]
    return [*kernels, *engine, "scheduler", *SLOWER_S]


def compare(todo: Sequence[str], sides: Sequence[Side], rounds: int, tries: int) -> list[Compared]:
    """Every case in turns; the side that begins alternates."""
    results = []
    with Progress(len(todo), "bench compare") as bar:
        for case in todo:
            note(case)
            results.append(by_turns(case, sides, rounds, tries))
            tell(str(results[-1]))
            bar.step(case, bad=not results[-1].met)
    return results


def by_turns(case: str, sides: Sequence[Side], rounds: int, tries: int) -> Compared:
    """`rounds` pairs of turns. A disturbed pair is repeated, the quietest of its tries counts."""
    times: list[list[float]] = [[], []]
    undisturbed = True
    try:
        for side in sides:
            side.measure(case, 0)  # prepares and warms
        for turn in range(rounds):
            tried: list[tuple[float, list[float]]] = []
            while len(tried) < tries and (not tried or min(tried)[0] > QUIET):
                if tried:
                    wait_for_quiet()
                tried.append(pair(case, sides, 1 + turn * tries + len(tried)))
            others, values = min(tried)
            undisturbed &= others <= QUIET
            for at, value in enumerate(values):
                times[at].append(value)
    except RuntimeError as error:
        return Compared(case, (), (), undisturbed, error=str(error))
    return Compared(case, tuple(times[0]), tuple(times[1]), undisturbed)


def pair(case: str, sides: Sequence[Side], seed: int) -> tuple[float, list[float]]:
    """(share of the machine that others used, seconds of each side)."""
    order = [0, 1] if seed % 2 else [1, 0]
    values = [0.0, 0.0]
    before = sum(side.cpu_s() for side in sides)
    with watched() as quiet:
        for at in order:
            values[at] = sides[at].measure(case, seed)
    own = sum(side.cpu_s() for side in sides) - before
    return quiet.others - own / (quiet.wall_s * (os.cpu_count() or 1)), values


def summary(base: str, results: Sequence[Compared]) -> dict[str, object]:
    """The document: where, every turn, the geometric mean of the ratios."""
    ratios = [r.ratio for r in results if r.case not in SLOWER_S and not r.error]
    mean = geometric_mean(ratios) if ratios else 1.0
    rows = [{**asdict(r), "ratio": round(r.ratio, 4), "met": r.met} for r in results]
    return {
        "environment": place(torch.get_num_threads()),
        "base": base,
        "mean_ratio": round(mean, 4),
        "least_ratio": round(min(ratios, default=1.0), 4),
        "undisturbed": all(r.undisturbed for r in results),
        "met": mean >= LEAST_MEAN and all(r.met for r in results),
        "cases": rows,
    }


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of ratios, of which there is one at least."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


@contextmanager
def base_tree(base: str) -> Iterator[Path]:
    """The package as it was at a commit, in a folder of its own."""
    command = ["git", "archive", "--format=tar", base, "lockstep"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    if done.returncode:
        got = f"{base}: {done.stderr.decode(errors='replace').strip()}"
        raise RuleError("--base names a commit of this checkout", got, "See `git log --oneline`")
    with tempfile.TemporaryDirectory(prefix="lockstep-base-") as folder:
        with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


@contextmanager
def models(todo: Sequence[str]) -> Iterator[dict[str, str]]:
    """Folders of the models that the cases need; both sides load the very same files."""
    from lockstep.bench.peers import make_llama
    from lockstep.llm.engine import BUILTIN

    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        if any(name.endswith("100m") for name in todo):
            note("making the random llama")
            make_llama(Path(folder), small=False)
        yield {"builtin": str(BUILTIN), "100m": folder}
