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

from lockstep.lab.cells import Cell, Job, Result, run_jobs
from lockstep.lab.properties import Finding
from lockstep.lab.reverts import Revert, load, resolve

JOB_S = 120.0  # per cell; a bug that hangs is a bug that died


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
    """What became of one revert."""

    revert: Revert
    trials: tuple[Trial, ...]

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
        return list(
            dict.fromkeys(
                rule_of(f) for t in self.trials if t.checks for f in t.broken if is_guard(f)
            )
        )

    def by(self, checks: bool) -> list[str]:
        """What failed, over all cells."""
        return list(
            dict.fromkeys(name for t in self.trials if t.checks is checks for name in t.names())
        )

    def as_json(self) -> dict[str, Any]:
        """The revert as `lab reverts --json` writes it, its story included."""
        on, off = self.by(True), self.by(False)
        trials = [asdict(t) for t in self.trials]
        return {
            **case(self.revert),
            "killed": self.killed,
            "rules": self.rules(),
            "by_on": on,
            "by_off": off,
            "trials": trials,
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
        return [k for k in self.kills if not k.killed]

    def as_json(self) -> dict[str, Any]:
        """For the document."""
        baseline = {cell: result.as_json() for cell, result in self.baseline.items()}
        return {
            "reverts": [k.as_json() for k in self.kills],
            "baseline": baseline,
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
    names: Sequence[str], backend: str, workers: int, told: Callable[[str, bool], None]
) -> Campaign:
    """Every named revert in each of its cells. `told(what, bad)` hears of every job that is done;
    there are `len(jobs(...))`."""
    begin = time.perf_counter()
    chosen = {name: load(name) for name in names}
    for revert in chosen.values():
        resolve(revert.target)  # a target that vanished ends the run before it begins
    results: dict[tuple[str, bool, str], Result] = {}
    for job, some in run_jobs(jobs(list(chosen.values()), backend), workers, JOB_S):
        for result in some:
            results[job.revert, job.checks, f"{result.cell.recipe}/{result.cell.feature}"] = result
            told(job.revert or str(result.cell), (result.verdict == "passed") == bool(job.revert))
    kills = []
    for name, revert in chosen.items():
        asked = (
            []
            if revert.equivalent
            else [(cell, checks) for checks in (True, False) for cell in revert.cells]
        )
        kills.append(
            Kill(
                revert,
                tuple(
                    _trial(revert, cell, checks, results[name, checks, cell])
                    for cell, checks in asked
                ),
            )
        )
    baseline = {cell: result for (name, _, cell), result in results.items() if not name}
    return Campaign(tuple(kills), baseline, time.perf_counter() - begin)


def jobs(chosen: Sequence[Revert], backend: str) -> list[Job]:
    """Every cell once without a bug, then every bug with checks on and off, one cell at a time."""
    asked = [r for r in chosen if not r.equivalent]
    plain = dict.fromkeys(cell for r in asked for cell in r.cells)
    out = [Job((Cell.parse(f"{backend}/{cell}"),), quick=True) for cell in plain]
    for revert in asked:
        out += [
            Job((Cell.parse(f"{backend}/{cell}"),), revert.name, checks, True)
            for cell in revert.cells
            for checks in (True, False)
        ]
    return out


def _trial(revert: Revert, cell: str, checks: bool, result: Result) -> Trial:
    broken = tuple(f for f in result.findings if not f.held)
    killed = any(counts(f, revert, checks) for f in broken)
    return Trial(cell, checks, killed, result.verdict, broken, result.seconds)
