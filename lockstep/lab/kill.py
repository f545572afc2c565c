"""Puts every historical bug back and sees whether the lab notices, with the plan checks on and off.

A revert is killed in a cell if the cell fails by a guard (the plan's own rules, checks on only) or
a property; an exception or a dead process counts only where the revert says CRASH. All its cells
must be killed, both ways, and be green without it. `lab reverts` writes and prints what comes out.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lockstep.attention import select
from lockstep.lab.cells import Cell, CellTask, Result, refusal, run_tasks
from lockstep.lab.document import Document
from lockstep.lab.options import CPU, Device, RunOptions
from lockstep.lab.properties import Finding
from lockstep.lab.reverts import Revert, resolve
from lockstep.progress import Progress

TASK_S = 120.0  # per cell; a bug that hangs is a bug that died
BOTH = (True, False)  # checks on, and off


def case(revert: Revert) -> dict[str, Any]:
    """A case file as data, without anything measured."""
    return {key: value for key, value in vars(revert).items() if key != "make"}


def run(chosen: Sequence[Revert], backend: str, workers: int, device: Device = CPU) -> Document:
    """Every revert in each of its cells. `red`: cells that fail without a bug; `unproven`: bugs
    that the backend is not proven against, and why."""
    begin, todo = time.perf_counter(), tasks(chosen, backend, device)
    for revert in chosen:
        resolve(revert.target)  # a target that vanished ends the run before it begins
    results: dict[tuple[str, bool, str], Result] = {}
    with Progress(len(todo), "lab reverts") as bar:
        for task, (result,) in run_tasks(todo, workers, TASK_S):
            cell = f"{result.cell.recipe}/{result.cell.feature}"
            results[task.revert, task.options.checks, cell] = result
            bad = (result.verdict == "passed") == bool(task.revert)
            bar.step(task.revert or str(result.cell), bad)
    kills = []
    for revert in chosen:
        cells, unasked = asked(revert, backend, device)
        found = [(c, cell, results[revert.name, c, cell]) for c in BOTH for cell in cells]
        kills.append(kill(revert, found, unasked))
    baseline = {cell: result for (name, _, cell), result in results.items() if not name}
    return {
        "reverts": kills,
        "baseline": {cell: result.as_json() for cell, result in baseline.items()},
        "red": [cell for cell, result in baseline.items() if result.verdict != "passed"],
        "unproven": {
            k["name"]: k["unasked"] or f"{k['target']} changes nothing"
            for k in kills
            if not k["killed"]
        },
        "seconds": round(time.perf_counter() - begin, 2),
    }


def kill(revert: Revert, found: Sequence[tuple[bool, str, Result]], unasked: str) -> Document:
    """What became of a bug: killed in every cell, both ways, by which rules and properties."""
    rules: dict[str, None] = {}
    by: dict[bool, dict[str, None]] = {checks: {} for checks in BOTH}
    trials = []
    for checks, cell, result in found:
        broken = [f for f in result.findings if not f.held]
        killed = any(counts(f, revert, checks) for f in broken)
        trial = {"cell": cell, "checks": checks, "killed": killed, "verdict": result.verdict}
        trials.append({**trial, "broken": list(map(asdict, broken))})
        for finding in broken:
            by[checks]["guard" if is_guard(finding) else finding.name] = None
            if checks and is_guard(finding):
                rules[finding.detail.removeprefix("PlanError: ").partition("; got ")[0]] = None
    return {
        **case(revert),
        "unasked": unasked,
        "killed": bool(revert.equivalent or trials) and all(t["killed"] for t in trials),
        "rules": list(rules),
        "by_on": list(by[True]),
        "by_off": list(by[False]),
        "trials": trials,
    }


def is_guard(finding: Finding) -> bool:
    return finding.name == "plan" and finding.detail.startswith("PlanError: ")


def counts(finding: Finding, revert: Revert, checks: bool) -> bool:
    """Whether this finding proves that the lab noticed."""
    if finding.name in ("raised", "crash"):
        return revert.crash
    return checks or not is_guard(finding)


def asked(revert: Revert, backend: str, device: Device) -> tuple[tuple[str, ...], str]:
    """The cells in which a bug must be noticed, and, where there are none, why."""
    if revert.equivalent:
        return (), ""
    if revert.backend not in ("", backend):
        return (), f"a bug in the text of {revert.backend}"
    made = select.load(backend)
    reasons = {c: refusal(Cell.parse(f"{backend}/{c}"), made, device) for c in revert.cells}
    taken = tuple(cell for cell, reason in reasons.items() if reason is None)
    return taken, "" if taken else f"its cells are refused: {next(iter(reasons.values()))}"


def tasks(chosen: Sequence[Revert], backend: str, device: Device = CPU) -> list[CellTask]:
    """Every cell once without a bug, then every bug with checks on and off, one cell at a time."""

    def task(cell: str, name: str = "", checks: bool = True) -> CellTask:
        options = RunOptions(device=device, checks=checks, quick=True)
        return CellTask((Cell.parse(f"{backend}/{cell}"),), options, name)

    named = [(r.name, cell) for r in chosen for cell in asked(r, backend, device)[0]]
    out = [task(cell) for cell in dict.fromkeys(cell for _, cell in named)]
    return out + [task(cell, name, checks) for name, cell in named for checks in BOTH]
