"""The matrix: backend x recipe x feature, every pair of a table that makes sense, and the verdict
of each.

A cell passed, was refused with the backend's own reason, or failed; there is no "not tested". Cells
run in worker processes, the two backends of a pair together so that stories, numbers and answers
are made once; a cell that kills its process failed like any other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.attention import select
from lockstep.attention.base import Backend
from lockstep.lab import isolate, reverts
from lockstep.lab.properties import Finding
from lockstep.lab.sheets import SHEETS, Sheet, sheet_of
from lockstep.types import PlanError, RuleError

CELL_S = 600.0  # a cell that takes longer is a crash


@dataclass(frozen=True)
class Cell:
    """One point of the matrix."""

    backend: str
    recipe: str
    feature: str

    def __str__(self) -> str:
        return f"{self.backend}/{self.recipe}/{self.feature}"

    @staticmethod
    def parse(text: str) -> Cell:
        """`backend/recipe/feature` as it is printed everywhere."""
        parts = text.split("/")
        sheet = sheet_of(parts[1]) if len(parts) == 3 else None
        if sheet is None or parts[2] not in {f.name for f in sheet.features}:
            raise RuleError(
                "a cell is backend/recipe/feature, like cpu/decode/window",
                repr(text),
                "See `lockstep lab run --list`",
            )
        return Cell(*parts)

    @property
    def sheet(self) -> Sheet:
        """The table it stands in."""
        sheet = sheet_of(self.recipe)
        if sheet is None:
            raise RuleError(
                "a cell's recipe is one of the lab's",
                repr(self.recipe),
                "See `lockstep lab run --list`",
            )
        return sheet

    def pair(self) -> tuple[Any, Any]:
        """The recipe and the feature themselves."""
        recipe = next(r for r in self.sheet.recipes if r.name == self.recipe)
        return recipe, next(f for f in self.sheet.features if f.name == self.feature)


@dataclass(frozen=True)
class Result:
    """What a cell came to. `verdict` is passed, refused or failed."""

    cell: Cell
    verdict: str
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    out_error: float = 0.0
    lse_error: float = 0.0
    tolerance_used: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def failed(self) -> list[str]:
        """The properties that did not hold."""
        return [f.name for f in self.findings if not f.held]

    def as_json(self) -> dict[str, object]:
        """The cell as `lab run --json` writes it."""
        command = (
            f"lockstep lab run --backend {self.cell.backend} --recipe {self.cell.recipe} --feature "
            f"{self.cell.feature}"
        )
        return {**asdict(self), **asdict(self.cell), "cell": str(self.cell), "command": command}


def cells(
    backends: Sequence[str], recipe: str | None = None, feature: str | None = None
) -> list[Cell]:
    """Every cell that makes sense, in the order of the matrix."""
    pairs = [(r.name, f.name) for sheet in SHEETS for f in sheet.features for r in sheet.asked(f)]
    return [
        Cell(b, r, f)
        for r, f in pairs
        if recipe in (None, r) and feature in (None, f)
        for b in backends
    ]


def refusal(cell: Cell, backend: Backend) -> str | None:
    """Why the backend does not take this cell, by its own caps, or None."""
    return cell.sheet.refusal(*cell.pair(), backend)


def run_cell(cell: Cell, checks: bool = True, quick: bool = False) -> Result:
    """Judges one cell; an error of the code under test is a finding, not an end."""
    backend = select.load(cell.backend)
    why = refusal(cell, backend)
    if why is not None:
        return Result(cell, "refused", why)
    begin = time.perf_counter()
    try:
        j = cell.sheet.judge(*cell.pair(), backend, checks, quick)
    except Exception as error:  # whatever a broken backend raises belongs into its cell
        name = "plan" if isinstance(error, PlanError) else "raised"
        finding = Finding(name, False, f"{type(error).__name__}: {error}")
        return Result(
            cell, "failed", finding.detail, (finding,), seconds=time.perf_counter() - begin
        )
    broken = [f for f in j.findings if not f.held]
    verdict, reason = (
        ("failed", f"{broken[0].name}: {broken[0].detail}") if broken else ("passed", "")
    )
    seconds = time.perf_counter() - begin
    return Result(
        cell,
        verdict,
        reason,
        tuple(j.findings),
        j.out_error,
        j.lse_error,
        j.tolerance_used,
        j.counters,
        seconds,
    )


@dataclass(frozen=True)
class Job:
    """Cells judged one after another in one process, with a bug put back or without."""

    cells: tuple[Cell, ...]
    revert: str = ""
    checks: bool = True
    quick: bool = False


def run(
    todo: Iterable[Cell], quick: bool = False, workers: int = 2, checks: bool = True
) -> Iterator[Result]:
    """Judges cells, as they come."""
    pairs: dict[tuple[str, str], list[Cell]] = {}
    for cell in todo:
        pairs.setdefault((cell.recipe, cell.feature), []).append(cell)
    for _, results in run_jobs(
        [Job(tuple(group), checks=checks, quick=quick) for group in pairs.values()], workers
    ):
        yield from results


def run_jobs(
    jobs: Sequence[Job], workers: int, cell_s: float = CELL_S
) -> Iterator[tuple[Job, list[Result]]]:
    """Runs jobs in worker processes, or with 0 of them right here. A job that dies is split, so
    that the blame lands on one cell."""
    if workers < 1:
        yield from ((job, run_job(job)) for job in jobs)
        return
    alone: list[Job] = []
    for job, answer in isolate.run(run_job, jobs, workers, lambda job: cell_s * len(job.cells)):
        if not isinstance(answer, isolate.Died):
            yield job, answer
        elif len(job.cells) > 1:
            alone += [replace(job, cells=(cell,)) for cell in job.cells]
        else:
            yield (
                job,
                [
                    Result(
                        job.cells[0],
                        "failed",
                        f"crash: {answer.why}",
                        (Finding("crash", False, answer.why),),
                    )
                ],
            )
    if alone:
        yield from run_jobs(alone, workers, cell_s)


def run_job(job: Job) -> list[Result]:
    """What a worker process does."""
    with reverts.swapped(reverts.load(job.revert)) if job.revert else nullcontext():
        return [run_cell(cell, job.checks, job.quick) for cell in job.cells]
