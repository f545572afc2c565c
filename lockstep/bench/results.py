"""Measures contenders alternately on a machine that others use too, and judges the results.

A run in which other processes took CPU time (by /proc/stat, where it exists) does not count.
`Bench` is a command's run: cases are judged by medians, ratios to the peers and targets, and
printed. A case is the dictionary of the document, so lines and tables can be printed again from a
file. On a card, the programs in bench/gpu measure, each with its own peers, floors and ceilings.
Every benchmark calls this module, which does not know what is measured.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from lockstep.bench.contender import block_median
from lockstep.kernels.select import select
from lockstep.lab.document import command_line, environment, head, publish, render
from lockstep.types import RuleError

ROOT = Path(__file__).parent.parent.parent
OTHERS = 0.05  # share of the machine's CPU time that others may use in an undisturbed run
PATIENCE_S = 30.0  # longest wait for an idle machine before a disturbed run is repeated

Result = dict[str, Any]
Measure = Callable[[int], float]  # of a seed that is never repeated; in the case's unit
Answer = TypeVar("Answer")


def measure_disturbance(
    measure: Callable[[], Answer], own: Callable[[], float] | None = None
) -> tuple[float, Answer]:
    """Returns the share of the machine that other processes used meanwhile, and the result of
    `measure`. `own` returns our CPU seconds; by default those of this process."""
    own = own or _own
    begin, busy, ours = time.perf_counter(), _busy(), own()
    answer = measure()
    have = (time.perf_counter() - begin) * (os.cpu_count() or 1)
    return max(0.0, ((_busy() - busy) - (own() - ours)) / have), answer


@dataclass
class Timing:
    """The measurements of each contender, one entry per run."""

    runs: dict[str, list[Any]] = field(default_factory=dict)
    undisturbed: bool = True  # every run was
    others: dict[str, list[float]] = field(default_factory=dict)  # their shares of the machine

    def add(self, name: str, others: float, value: Any) -> None:
        self.runs.setdefault(name, []).append(value)
        self.others.setdefault(name, []).append(round(others, 3))
        self.undisturbed &= others <= OTHERS

    def median(self, name: str) -> float:
        return float(statistics.median(self.runs[name]))

    def scaled(self, by: float) -> "Timing":
        return replace(self, runs={n: [by * v for v in runs] for n, runs in self.runs.items()})


def alternate(
    contenders: Mapping[str, Callable[[int], Any]],
    runs: int,
    tries: int,
    own: Callable[[], float] | None = None,
) -> Timing:
    """Measures contenders alternately, `runs` times each, changing which is first. While other
    processes use the machine, a run is repeated with a new seed, at most `tries` times; the least
    disturbed one counts."""
    timing, names, pause = Timing(), list(contenders), partial(time.sleep, 0.5)
    for run in range(runs):
        for name in names if run % 2 == 0 else reversed(names):
            found: list[tuple[float, int, Any]] = []
            while len(found) <= tries and (not found or min(found)[0] > OTHERS):
                again = f", disturbed, try {len(found) + 1}" if found else ""
                note(f"{name}, run {run + 1} of {runs}{again}")
                end = time.perf_counter() + (PATIENCE_S if found else 0.0)
                while time.perf_counter() < end and measure_disturbance(pause)[0] > OTHERS:
                    pass
                seed = 1 + run * (tries + 1) + len(found)
                others, answer = measure_disturbance(partial(contenders[name], seed), own)
                found.append((others, len(found), answer))
            others, _, answer = min(found)
            timing.add(name, others, answer)
    return timing


def called(call: Callable[[], object], seconds: float) -> Measure:
    """Measures the median of a block of microsecond calls. Each contender has blocks of its own, in
    which no other contender's spinning threads occupy the cores."""
    return lambda _: block_median(call, seconds)


def place(threads: int) -> dict[str, object]:
    """Returns the head of a benchmark's document: environment, thread count, command."""
    return {**environment(), "threads": threads, "command": command_line()}


def note(text: str) -> None:
    """Shows progress on a terminal, on a line that the next one replaces."""
    if sys.stderr.isatty():
        tell(f"{text} ...", end="")


def tell(text: str, end: str = "\n") -> None:
    """Writes a line to stderr that stays."""
    begin = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{begin}{text}", file=sys.stderr, end=end, flush=True)


def _busy() -> float:
    """Returns the CPU seconds that the whole machine has worked, stolen time included."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return _own()
    ticks = map(float, stat.read_text().partition("\n")[0].split()[1:])
    user, nice, system, _, _, irq, softirq, steal, *_ = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Bench:
    """A command's run: alternating contenders, with the options' repetitions, its cases and
    document. A quick run accepts disturbed measurements."""

    def __init__(self, args: Namespace, runs: int = 3, tries: int = 3) -> None:
        self.args, self.runs, self.tries = args, args.repeat or runs, tries
        if args.quick:
            self.runs, self.tries = args.repeat or 1, 0
        threads, most = args.threads or torch.get_num_threads(), os.cpu_count() or 1
        if threads > most:
            rule = f"--threads is at most {most}, the number of cores"
            raise RuleError(rule, str(threads), "Omit it to use all cores")
        torch.set_num_threads(threads)
        self.document: dict[str, Any] = {"environment": place(threads), "quick": args.quick}
        self.document |= {"repeat": self.runs, "cases": []}

    def alternate(self, contenders: Mapping[str, Measure]) -> Timing:
        return alternate(contenders, self.runs, self.tries)

    def result(
        self, timing: Timing, unit: str, targets: Mapping[str, float], limit: float | None = None
    ) -> Result:
        """Returns a case's results: medians, ratios to the peers (above 1 is better than the peer),
        every run. `targets` are the least ratios, `limit` the largest value. A peer in `targets`
        without a number misses its target. `met` is None if nothing was judged: no target, a quick
        run, or other processes used the machine, which can slow a contender twentyfold."""
        values = {name: round(timing.median(name), 4) for name in timing.runs}
        ours = values["lockstep"]
        sign = 1 if unit.endswith("per second") else -1  # a higher or a lower value is better
        ratios = {n: round((ours / v) ** sign, 3) for n, v in values.items() if n != "lockstep"}
        reached = all(ratios.get(n, 0.0) >= least for n, least in targets.items())
        within = limit is None or ours <= limit
        judged = timing.undisturbed and not self.args.quick and (bool(targets) or limit is not None)
        return {
            "unit": unit,
            "values": values,
            "ratios": ratios,
            "targets": dict(targets),
            "limit": limit,
            "met": (reached and within) if judged else None,
            "undisturbed": timing.undisturbed,
            "runs": {name: [round(v, 4) for v in each] for name, each in timing.runs.items()},
            "others": timing.others,
        }

    def add(self, case: Result) -> None:
        """Adds a finished case and prints it to stderr."""
        self.document["cases"].append(case)
        tell(line(case))

    def publish(self) -> int:
        """Publishes; returns 1 if a target was missed or could not be judged."""
        publish(self.args, self.document, [summary(self.document)])
        return int(failed(self.document))


def line(case: Result) -> str:
    """Returns one case in a line: verdict, value, ratios with their targets, problems."""
    return _text("results.txt", cases=[case], doc=None, disturbed=())


def summary(document: Mapping[str, Any], every: bool = False) -> str:
    """Returns how many cases reach their targets, and which do not; `every` lists all cases."""
    shown = document["cases"] if every else []
    return _text("results.txt", cases=shown, doc=document, disturbed=unjudged(document))


def _text(name: str, **values: Any) -> str:
    return render(name, package="lockstep.bench", **values).rstrip("\n")


def unjudged(document: Mapping[str, Any]) -> list[str]:
    """Returns the cases whose targets could not be judged because other processes ran."""
    aimed = [c for c in document["cases"] if c["targets"] or c["limit"] is not None]
    return [c["case"] for c in aimed if not document["quick"] and not c["undisturbed"]]


def failed(document: Mapping[str, Any]) -> bool:
    """Returns whether a target was missed or could not be judged."""
    return any(c["met"] is False for c in document["cases"]) or bool(unjudged(document))


def markdown(document: Mapping[str, Any]) -> str:
    return _text("engine.md", doc=document)


def run_on_card(what: str, args: Namespace, *given: str) -> int:
    """Runs bench/gpu/<what>_h200.py and publishes what it wrote."""
    program = ROOT / "bench" / "gpu" / f"{what}_h200.py"
    if not program.is_file():
        rule = "GPU benchmarks are in bench/gpu of the repository"
        raise RuleError(rule, f"no file {program}", "Run this in a clone of the repository")
    select("cuda", "auto")  # fails here with a one-line reason
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(program), "--out", folder, *given]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        files = sorted(Path(folder).glob("*-h200*.json"))
        found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    failed = done.returncode or not found
    told = f"{program.name} exited with code {done.returncode}" if failed else ", ".join(found)
    publish(args, {**head(), "results": found}, [told])
    return int(bool(failed))


def gemm(args: Namespace) -> int:
    """`bench gemm`: our chosen GEMM against cuBLAS, for the shapes of one model."""
    return run_on_card("gemm", args, "--model", args.shapes, "--chosen")
