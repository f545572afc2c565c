"""What was measured of a case, judged and printed: medians, ratios to the others, targets.

A result is a dictionary, as it stands in the document, so that lines and tables can be printed
again from a file. `bench attention` and `bench engine` share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.bench.machine import Timing
from lockstep.lab.document import render

HIGHER = "tokens per second"  # the one unit of which more is better
MARKS = {True: "ok ", False: "LOW", None: "-- "}
DESCRIPTIONS = {
    "generate": "model.generate, batch 1, sdpa, default cache, inference_mode",
    "static": "model.generate, left padding, as many new tokens as the longest needs, sdpa, "
    "inference_mode",
    "continuous": "ContinuousBatchingManager, sdpa, add_request with each one's max_new_tokens",
}
WIDE = 32  # of a case's name in a line

Result = dict[str, Any]


def result(
    timing: Timing,
    unit: str,
    targets: Mapping[str, float],
    *,
    limit: float | None = None,
    absent: bool = False,
    quick: bool = False,
    **more: Any,
) -> Result:
    """A case: medians, ratios to the others (above 1 is better than they), every run. `targets` are
    the least ratios, `limit` the largest value. A contender that gave no number has missed its
    target, unless it is `absent`: nobody asked for it. `met` is None if nothing was judged: there
    is no target, the run was quick, or others used the machine, which can slow a contender
    twentyfold."""
    values = {name: round(timing.median(name), 4) for name in timing.runs}
    ours, sign = values["lockstep"], 1 if unit == HIGHER else -1
    ratios = {n: round((ours / v) ** sign, 3) for n, v in values.items() if n != "lockstep"}
    wanted = {n: least for n, least in targets.items() if n in ratios or not absent}
    reached = all(ratios.get(n, 0.0) >= least for n, least in wanted.items())
    within = limit is None or ours <= limit
    judged = timing.undisturbed and not quick and (bool(wanted) or limit is not None)
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
        **more,
    }


def line(case: Result) -> str:
    """One case: verdict, value, ratios with their targets, and what went wrong."""
    value = f"{case['values']['lockstep']:10.3f} {case['unit']}"
    if case["limit"] is not None:
        value += f" (<= {case['limit']:g})"
    least = {name: f" (>= {ratio:g})" for name, ratio in case["targets"].items()}
    told = [f"{name} x{x:.2f}{least.get(name, '')}" for name, x in case["ratios"].items()]
    told += [f"{name} failed: {reason}" for name, reason in _errors(case).items()]
    if not case["undisturbed"]:
        told.append("disturbed")
    return "  ".join([f"{MARKS[case['met']]} {case['case']:{WIDE}}{value}", *told])


def summary(document: Mapping[str, Any]) -> str:
    """How many cases reach their targets, and which do not."""
    judged = [c for c in document["cases"] if c["met"] is not None]
    missed = [c["case"] for c in judged if not c["met"]]
    disturbed = open_targets(document)
    rest = len(document["cases"]) - len(judged) - len(disturbed)
    told = f"{len(judged) - len(missed)} of {len(judged)} judged cases reach their targets"
    told += f": not {'; '.join(missed)}" if missed else ""
    told += f"; disturbed, so not judged: {', '.join(disturbed)}" if disturbed else ""
    return told + (f"; {rest} measured without a target to judge" if rest else "")


def open_targets(document: Mapping[str, Any]) -> list[str]:
    """Cases whose targets could not be judged because others used the machine."""
    found = [c for c in document["cases"] if not document["quick"] and not c["undisturbed"]]
    judged = [set(c["targets"]) & {*c["ratios"], *_errors(c)} for c in found]
    return [c["case"] for c, j in zip(found, judged, strict=True) if j or c["limit"] is not None]


def failed(document: Mapping[str, Any]) -> bool:
    """Whether a target was missed, or could not be judged."""
    return any(c["met"] is False for c in document["cases"]) or bool(open_targets(document))


def plain(document: Mapping[str, Any]) -> str:
    """All cases, one line each, and the sum of it."""
    return "\n".join([*map(line, document["cases"]), summary(document)])


def markdown(document: Mapping[str, Any]) -> str:
    """Where it ran, and one row per case and contender."""
    return render("engine.md", [number], package="lockstep.bench", doc=document).rstrip("\n")


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _errors(case: Result) -> dict[str, str]:
    return dict(case.get("more", {}).get("errors", {}))
