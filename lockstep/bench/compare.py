"""`lockstep bench compare` and `lockstep bench step`: this tree against an older commit of it.

Two processes, one per source tree, measure the same case alternately, so that disturbances of the
machine affect both. What is measured is defined in `contender`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from subprocess import PIPE

import torch

from lockstep.bench import contender, results
from lockstep.bench.attention import cases as attention_cases
from lockstep.bench.contender import NOT_HOST, Answer
from lockstep.bench.results import Result, Timing, note, place, tell
from lockstep.bench.work import llama_folder
from lockstep.lab.document import publish, text
from lockstep.llm.engine import BUILTIN
from lockstep.types import RuleError

ROOT = Path(__file__).parents[2]
LEAST_MEAN, LEAST_EACH = 0.99, 0.95
MODELS = ("builtin", "100m")
SLOWER_S = {"load builtin": 1.0, "load 100m": 3.0}  # how much longer loading may take
STEP = "step"  # the case of `bench step`: host time of a decode step
HOST_MEDIAN_S, HOST_MEAN_S, HOST_SHARE = 3e-3, 5e-3, 0.6  # host time; share of the old tree's
TRIES = 2  # repetitions of a disturbed run


class Side(subprocess.Popen[str]):
    def __init__(self, tree: Path, folders: dict[str, str]) -> None:
        # -P: files beside contender.py must not shadow modules of other packages
        command = [sys.executable, "-P", contender.__file__, json.dumps(folders)]
        env = {**os.environ, "PYTHONPATH": str(tree)}
        super().__init__(command, stdin=PIPE, stdout=PIPE, text=True, cwd=tree, env=env)

    def measure(self, case: str, seed: int) -> Answer:
        """Measures a case once; an error of the process is raised here."""
        assert self.stdin is not None and self.stdout is not None, "both ends are pipes"
        print(json.dumps({"case": case, "seed": seed}), file=self.stdin, flush=True)
        line = self.stdout.readline()
        if not line:
            raise RuntimeError(f"the process exited with code {self.wait()}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def cpu_s(self) -> float:
        """Returns the CPU seconds of the process and of its children that have ended."""
        stat = Path(f"/proc/{self.pid}/stat")
        if not stat.exists():
            return 0.0
        fields = stat.read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run(args: argparse.Namespace) -> int:
    """Prints a line per case, writes JSON; returns 1 if a case or the mean is too slow."""
    todo = [name for name in names() if not args.case or any(name.startswith(c) for c in args.case)]
    if not todo:
        rule, remedy = "--case is the beginning of a case's name", f"One is {names()[0]!r}"
        raise RuleError(rule, ", ".join(args.case), remedy)
    timings: dict[str, list[Timing]] = {name: [] for name in todo}
    errors, folders = dict[str, str](), {"builtin": str(BUILTIN)}
    with ExitStack() as stack:
        if any(name.endswith("100m") for name in todo):
            note("making the random llama")
            folders["100m"] = str(stack.enter_context(llama_folder(small=False)))
        for _ in range(args.starts):  # memory addresses differ from start to start
            with sides_of(args.base, folders) as sides:
                for name in todo:
                    try:
                        timings[name].append(by_turns(name, sides, args))
                    except RuntimeError as error:
                        errors[name] = str(error)
                    tell(line(judged(name, timings[name], errors.get(name, ""))))
    cases = [judged(name, starts, errors.get(name, "")) for name, starts in timings.items()]
    document = summary(args.base, cases)
    told = text("compare.txt", "lockstep.bench", cases=[], doc=document, least=LEAST_MEAN)
    publish(args, document, told)
    return int(not document["met"])


def judged(case: str, starts: Sequence[Timing], error: str = "") -> Result:
    """Judges a case over all starts: seconds of every run on both sides, a list per start. A ratio
    above 1 is faster than before. It is the mean over starts: a working set that barely fits the
    caches is a third slower or faster from start to start, on either side."""
    old_s, new_s = (
        [[turn["seconds"] for turn in each.runs[key]] for each in starts] for key in ("old", "new")
    )
    steady = all(each.undisturbed for each in starts)
    found: Result = {"case": case, "old_s": old_s, "new_s": new_s, "undisturbed": steady}
    if error:
        return {**found, "error": error, "ratio": 0.0, "met": False}
    pairs = zip(old_s, new_s, strict=True)
    ratio = geometric_mean([median(old) / median(new) for old, new in pairs])
    old, new = median(chain(*old_s)), median(chain(*new_s))
    met = ratio >= LEAST_EACH
    if case in SLOWER_S:
        met = new - old <= SLOWER_S[case]
    told = {"error": "", "medians_s": (old, new), "ratio": round(ratio, 4), "met": met}
    return {**found, **told}


def line(case: Result) -> str:
    """Returns a case as text."""
    return "\n".join(text("compare.txt", "lockstep.bench", cases=[case], doc=None))


def run_step(args: argparse.Namespace) -> int:
    """Measures a decode step's host time by part, here and at `base`; returns 1 if too long."""
    with sides_of(args.base, {"builtin": str(BUILTIN)}) as sides:
        timing = by_turns(STEP, sides, args)
    medians, means = (
        {
            side: {part: median(turn[kind][part] for turn in turns) for part in turns[0][kind]}
            for side, turns in timing.runs.items()
        }
        for kind in ("medians", "means")
    )
    new = medians["new"]["host"]
    met = new <= HOST_MEDIAN_S and means["new"]["host"] <= HOST_MEAN_S
    if args.base:
        met = met and new <= HOST_SHARE * medians["old"]["host"]
    document = {
        "environment": place(torch.get_num_threads()),
        "base": args.base,
        "requests, keys, steps": contender.FULL.host,
        "not_host": NOT_HOST,
        "medians_s": medians,
        "means_s": means,
        "undisturbed": timing.undisturbed,
        "met": met,
    }
    publish(args, document, text("step.txt", "lockstep.bench", doc=document))
    return int(not met or not timing.undisturbed)


def names() -> list[str]:
    kernels = [f"attention {case.name}" for case in attention_cases(False)]
    engine = [f"{k} {m}" for m in MODELS for k in ("decode", "mixed", "prefix", "prefill")]
    return [*kernels, *engine, STEP, *SLOWER_S]


def by_turns(case: str, sides: Mapping[str, Side], args: argparse.Namespace) -> Timing:
    """Returns each side's measurements, taken alternately."""
    for side in sides.values():
        side.measure(case, 0)  # prepares and warms up
    note(case)
    return results.alternate(
        {name: partial(side.measure, case) for name, side in sides.items()},
        args.repeat or 5,
        tries=0 if args.quick else TRIES,
        own=lambda: sum(side.cpu_s() for side in sides.values()),
    )


@contextmanager
def sides_of(base: str | None, folders: dict[str, str]) -> Iterator[dict[str, Side]]:
    """Starts a process for this tree, and one for that of an older commit if one is named."""
    with ExitStack() as stack:
        trees = {"old": stack.enter_context(base_tree(base))} if base is not None else {}
        sides = {}
        for name, tree in {**trees, "new": ROOT}.items():
            sides[name] = stack.enter_context(Side(tree, folders))
            stack.callback(sides[name].kill)
        yield sides


def summary(base: str, cases: Sequence[Result]) -> Result:
    ratios = [c["ratio"] for c in cases if c["case"] not in SLOWER_S and not c["error"]]
    mean = geometric_mean(ratios or [1.0])
    return {
        "environment": place(torch.get_num_threads()),
        "base": base,
        "mean_ratio": round(mean, 4),
        "least_ratio": min(ratios, default=1.0),
        "undisturbed": all(c["undisturbed"] for c in cases),
        "met": mean >= LEAST_MEAN and all(c["met"] for c in cases),
        "cases": cases,
    }


@contextmanager
def base_tree(base: str) -> Iterator[Path]:
    """Extracts the package at a commit into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="lockstep-base-") as folder:
        archive = Path(folder, "base.tar")
        command = ["git", "archive", f"--output={archive}", base, "lockstep"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            rule = "--base names a commit of this checkout"
            got = f"{base or 'no name'}: {done.stderr.strip()}"
            raise RuleError(rule, got, "See `git log --oneline`")
        shutil.unpack_archive(archive, folder, filter="data")
        yield Path(folder)
