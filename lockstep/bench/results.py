"""What was measured of a case, judged and printed: medians, ratios to the others, targets.

A result is a dictionary, as it stands in the document, so that lines and tables can be printed
again from a file. Every benchmark that has cases shares it; `Bench` is the run of a command.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lockstep.bench.machine import Measure, Timing, alternate, place, set_threads, tell
from lockstep.lab.document import publish, render

HIGHER = "tokens per second"  # of what is counted per second more is better

Result = dict[str, Any]


class Bench:
    """A command's run: contenders by turns, as often as was asked for, cases, one document. A quick
    run takes what it gets."""

    def __init__(self, args: Namespace, runs: int = 3, tries: int = 3) -> None:
        self.args, self.runs, self.tries = args, args.repeat or runs, tries
        if args.quick:
            self.runs, self.tries = args.repeat or 1, 0
        environment = place(set_threads(args.threads))
        self.document: dict[str, Any] = {"environment": environment, "quick": args.quick}
        self.document |= {"repeat": self.runs, "cases": []}

    def alternate(self, contenders: Mapping[str, Measure]) -> Timing:
        return alternate(contenders, self.runs, self.tries)

    def result(self, timing: Timing, unit: str, targets: Mapping[str, float], **how: Any) -> Result:
        return result(timing, unit, targets, quick=self.args.quick, **how)

    def add(self, case: Result) -> None:
        """A case is told on stderr when it is done."""
        self.document["cases"].append(case)
        tell(line(case))

    def publish(self) -> int:
        """1 if a target was missed, or could not be judged."""
        publish(self.args, self.document, [summary(self.document)])
        return int(failed(self.document))


def result(
    timing: Timing,
    unit: str,
    targets: Mapping[str, float],
    *,
    limit: float | None = None,
    quick: bool = False,
) -> Result:
    """A case: medians, ratios to the others (above 1 is better than they), every run. `targets` are
    the least ratios, `limit` the largest value. A contender without a number has missed its target.
    `met` is None if nothing was judged: no target, a quick run, or others used the machine, which
    can slow a contender twentyfold."""
    values = {name: round(timing.median(name), 4) for name in timing.runs}
    ours, sign = values["lockstep"], 1 if unit.endswith("per second") else -1
    ratios = {n: round((ours / v) ** sign, 3) for n, v in values.items() if n != "lockstep"}
    reached = all(ratios.get(n, 0.0) >= least for n, least in targets.items())
    within = limit is None or ours <= limit
    judged = timing.undisturbed and not quick and (bool(targets) or limit is not None)
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


def line(case: Result) -> str:
    """One case: verdict, value, ratios with their targets, and what went wrong."""
    return _text("results.txt", cases=[case], doc=None, disturbed=())


def summary(document: Mapping[str, Any], every: bool = False) -> str:
    """How many cases reach their targets, and which do not; with `every` the cases before it."""
    shown = document["cases"] if every else []
    return _text("results.txt", cases=shown, doc=document, disturbed=unjudged(document))


def _text(name: str, **values: Any) -> str:
    return render(name, package="lockstep.bench", **values).rstrip("\n")


def unjudged(document: Mapping[str, Any]) -> list[str]:
    """Cases whose targets could not be judged because others used the machine."""
    aimed = [c for c in document["cases"] if c["targets"] or c["limit"] is not None]
    return [c["case"] for c in aimed if not document["quick"] and not c["undisturbed"]]


def failed(document: Mapping[str, Any]) -> bool:
    """Whether a target was missed, or could not be judged."""
    return any(c["met"] is False for c in document["cases"]) or bool(unjudged(document))


def markdown(document: Mapping[str, Any]) -> str:
    return _text("engine.md", doc=document)
