"""The matrix: backend x recipe x feature, every pair that makes sense, and the verdict of each.

A cell passed, was refused with the backend's own reason, or failed; there is no "not tested". Cells run in worker processes, the two
backends of a pair together so that stories, numbers and answers are made once.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field

from lockstep.attention import select
from lockstep.lab.features import FEATURES, Feature
from lockstep.lab.properties import Finding, judge
from lockstep.lab.recipes import RECIPES, Recipe
from lockstep.types import PlanError


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
        if len(parts) != 3 or parts[1] not in {r.name for r in RECIPES} or parts[2] not in {f.name for f in FEATURES}:
            raise ValueError(f"a cell is backend/recipe/feature, like cpu/decode/window; got {text!r}. See `lockstep lab run --list`.")
        return Cell(*parts)

    def pair(self) -> tuple[Recipe, Feature]:
        """The recipe and the feature themselves."""
        return next(r for r in RECIPES if r.name == self.recipe), next(f for f in FEATURES if f.name == self.feature)


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
        command = f"lockstep lab run --backend {self.cell.backend} --recipe {self.cell.recipe} --feature {self.cell.feature}"
        return {**asdict(self), **asdict(self.cell), "cell": str(self.cell), "command": command}


def cells(backends: Sequence[str], recipe: str | None = None, feature: str | None = None) -> list[Cell]:
    """Every cell that makes sense, in the order of the matrix."""
    pairs = [(r, f) for f in FEATURES for r in RECIPES if r.suits(f) and recipe in (None, r.name) and feature in (None, f.name)]
    return [Cell(b, r.name, f.name) for r, f in pairs for b in backends]


def run_cell(cell: Cell, checks: bool = True, quick: bool = False) -> Result:
    """Judges one cell; an error of the code under test is a finding, not an end."""
    recipe, feature = cell.pair()
    backend = select.load(cell.backend)
    tails = any(name.startswith("tail") for name in recipe.proves)
    why = next((w for g in feature.groups(16) if (w := select.refusal(backend.caps, g, "cpu", tails))), None)
    if why is not None:
        return Result(cell, "refused", why)
    begin = time.perf_counter()
    try:
        j = judge(recipe, feature, backend, checks, quick)
    except Exception as error:  # whatever a broken backend raises belongs into its cell
        name = "plan" if isinstance(error, PlanError) else "raised"
        finding = Finding(name, False, f"{type(error).__name__}: {error}")
        return Result(cell, "failed", finding.detail, (finding,), seconds=time.perf_counter() - begin)
    broken = [f for f in j.findings if not f.held]
    verdict, reason = ("failed", f"{broken[0].name}: {broken[0].detail}") if broken else ("passed", "")
    seconds = time.perf_counter() - begin
    return Result(cell, verdict, reason, tuple(j.findings), j.out_error, j.lse_error, j.tolerance_used, j.counters, seconds)


def run(todo: Iterable[Cell], quick: bool = False, workers: int = 2) -> Iterator[Result]:
    """Judges cells in worker processes, as they come."""
    pairs: dict[tuple[str, str], list[Cell]] = {}
    for cell in todo:
        pairs.setdefault((cell.recipe, cell.feature), []).append(cell)
    if workers < 2 or len(pairs) < 2:
        yield from (run_cell(cell, quick=quick) for group in pairs.values() for cell in group)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_run_pair, group, quick) for group in pairs.values()]):
            yield from done.result()


def _run_pair(group: list[Cell], quick: bool) -> list[Result]:
    return [run_cell(cell, quick=quick) for cell in group]
