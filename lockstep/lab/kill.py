"""Puts every historical bug back and sees whether the lab notices: with the plan checks on, and
off.

A revert is killed in a cell if the cell fails for a reason that counts: a guard (the plan's own
rules, checks on only) or a property. An exception or a dead process is no proof of anything and
counts only where the revert says CRASH. All its cells must be killed, both ways, and the same cells
must be green without it. `lab reverts` calls this; `report` shows what comes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.attention import select
from lockstep.lab.cells import Cell, CellTask, Result, refusal, run_tasks
from lockstep.lab.options import CPU, Device, RunOptions
from lockstep.lab.properties import Finding
from lockstep.lab.reverts import Revert, load, resolve

TASK_S = 120.0  # per cell; a bug that hangs is a bug that died


@dataclass(frozen=True)
class Trial:
    """One cell with the bug in place."""

    cell: str
    checks: bool
    killed: bool
    verdict: str
    broken: tuple[Finding, ...]  # everything that did not hold
    seconds: float

    def names(self) -> list[str]:
        """What did not hold; a guard is called by that name."""
        return ["guard" if is_guard(f) else f.name for f in self.broken]


@dataclass(frozen=True)
class Kill:
    """What became of one revert. `unasked`: why it was tried in no cell."""

    revert: Revert
    trials: tuple[Trial, ...]
    unasked: str = ""

    def survivors(self, checks: bool) -> list[str]:
        """Cells in which nobody noticed."""
        return [t.cell for t in self.trials if t.checks is checks and not t.killed]

    @property
    def killed(self) -> bool:
        """In every cell, both ways. An equivalent mutant is not asked."""
        return bool(self.revert.equivalent) or (
            bool(self.trials) and not self.survivors(True) and not self.survivors(False)
        )

    def rules(self) -> list[str]:
        """The rules of the plan that it broke, in their own words."""
        guards = (f for t in self.trials if t.checks for f in t.broken if is_guard(f))
        return list(dict.fromkeys(map(rule_of, guards)))

    def by(self, checks: bool) -> list[str]:
        """What failed, over all cells."""
        names = (name for t in self.trials if t.checks is checks for name in t.names())
        return list(dict.fromkeys(names))

    def as_json(self) -> dict[str, Any]:
        """The revert as `lab reverts --json` writes it, its story included."""
        return {
            **case(self.revert),
            "killed": self.killed,
            "rules": self.rules(),
            "by_on": self.by(True),
            "by_off": self.by(False),
            "trials": [asdict(t) for t in self.trials],
        }


@dataclass(frozen=True)
class Campaign:
    """All reverts, and their cells without any."""

    kills: tuple[Kill, ...]
    baseline: dict[str, Result] = field(default_factory=dict)
    seconds: float = 0.0

    def red(self) -> list[str]:
        """Cells that fail without a bug: nothing can be proved with them."""
        return [cell for cell, result in self.baseline.items() if result.verdict != "passed"]

    def survivors(self) -> list[Kill]:
        """Reverts that got away somewhere."""
        return [k for k in self.kills if not k.killed and not k.unasked]

    def unproven(self) -> dict[str, str]:
        """Bugs that the backend is not proven against, and why."""
        unnoticed = {k.revert.name: f"{k.revert.target} changes nothing" for k in self.survivors()}
        return {k.revert.name: k.unasked for k in self.kills if k.unasked} | unnoticed

    def as_json(self) -> dict[str, Any]:
        """For the document."""
        baseline = {cell: result.as_json() for cell, result in self.baseline.items()}
        return {
            "reverts": [k.as_json() for k in self.kills],
            "baseline": baseline,
            "unproven": self.unproven(),
            "seconds": round(self.seconds, 2),
        }


def case(revert: Revert) -> dict[str, Any]:
    """A case file as data, without anything measured."""
    return {key: value for key, value in vars(revert).items() if key != "make"}


def is_guard(finding: Finding) -> bool:
    """The plan's own check stopped the step."""
    return finding.name == "plan" and finding.detail.startswith("PlanError: ")


def rule_of(finding: Finding) -> str:
    """The rule in a PlanError's text."""
    return finding.detail.removeprefix("PlanError: ").partition("; got ")[0]


def counts(finding: Finding, revert: Revert, checks: bool) -> bool:
    """Whether this finding proves that the lab noticed."""
    if finding.name in ("raised", "crash"):
        return revert.crash
    return checks or not is_guard(finding)


def run(
    names: Sequence[str],
    backend: str,
    workers: int,
    on_progress: Callable[[str, bool], None],
    device: Device = CPU,
) -> Campaign:
    """Every named revert in each of its cells. `on_progress(what, bad)` hears of every task that is
    done; there are `len(tasks(...))`."""
    begin = time.perf_counter()
    chosen = {name: load(name) for name in names}
    for revert in chosen.values():
        resolve(revert.target)  # a target that vanished ends the run before it begins
    results: dict[tuple[str, bool, str], Result] = {}
    todo = tasks(list(chosen.values()), backend, device)
    for task, some in run_tasks(todo, workers, TASK_S):
        for result in some:
            cell = f"{result.cell.recipe}/{result.cell.feature}"
            results[task.revert, task.options.checks, cell] = result
            bad = (result.verdict == "passed") == bool(task.revert)
            on_progress(task.revert or str(result.cell), bad)
    kills = []
    for name, revert in chosen.items():
        cells, reason = asked(revert, backend, device)
        trials = [
            _trial(revert, cell, checks, results[name, checks, cell])
            for checks in (True, False)
            for cell in cells
        ]
        kills.append(Kill(revert, tuple(trials), reason))
    baseline = {cell: result for (name, _, cell), result in results.items() if not name}
    return Campaign(tuple(kills), baseline, time.perf_counter() - begin)


def asked(revert: Revert, backend: str, device: Device) -> tuple[tuple[str, ...], str]:
    """The cells in which a bug must be noticed, and, where there are none, why: it is in another
    backend's text, or this one does not take its cells."""
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
    return out + [task(cell, name, checks) for name, cell in named for checks in (True, False)]


def _trial(revert: Revert, cell: str, checks: bool, result: Result) -> Trial:
    broken = tuple(f for f in result.findings if not f.held)
    killed = any(counts(f, revert, checks) for f in broken)
    return Trial(cell, checks, killed, result.verdict, broken, result.seconds)
