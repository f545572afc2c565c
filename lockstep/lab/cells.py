"""The matrix: backend x recipe x feature, every applicable pair of a table on every backend, and
the verdict of each cell.

One table is of attention alone, one of the whole engine on tiny models; a recipe's name belongs to
one of them. A cell passed, was refused with the backend's own reason, or failed; there is no "not
tested". Cells run in worker processes: one that kills its process has failed.

Every historical bug is put back, too, with the plan's checks on and off. A cell kills it by a guard
(the plan's own rules, checks on only) or a property; an exception or a dead process counts only
where the case file says CRASH. All its cells must kill it, and be green without it.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from lockstep.attention import select
from lockstep.attention.base import Backend
from lockstep.lab import attention_harness, engine_harness, isolate, reverts, table
from lockstep.lab.engine_recipes import play_recipe
from lockstep.lab.features import FEATURES, GPU_FEATURES
from lockstep.lab.guard import Finding, Judgement
from lockstep.lab.options import CPU, FULL, Device, RunOptions
from lockstep.lab.recipes import RECIPES, Recipe
from lockstep.lab.reverts import Revert
from lockstep.lab.tiny import BART, LLAMA, MODELS, QWEN3, Tiny, loaded
from lockstep.progress import Progress
from lockstep.types import GroupSpec, RuleError

CELL_S = 600.0  # a cell that takes longer is a crash
REVERT_S = 120.0  # the same limit with a bug put back: a hang counts as a crash
BOTH = (True, False)  # plan checks on and off
LOST = 77  # exit code of a process whose device was lost before its task began
# cells that are known to fail, "backend/recipe/feature", and the cause: docs/known-failures.md
KNOWN: dict[str, str] = {}
MODELS_OF: dict[str, Callable[[Tiny], bool]] = {
    "decoders": lambda tiny: tiny is not BART,
    "encoder-decoder": lambda tiny: tiny is BART,  # the only model with sources
    "every model": lambda tiny: True,
    "one model": lambda tiny: tiny is LLAMA,  # the sampler sees logits and no model
    "llama and qwen3": lambda tiny: tiny in (LLAMA, QWEN3),  # keeps all keys, drops some
}


@dataclass(frozen=True, eq=False)
class MatrixTable:
    """One table of the matrix. Recipes and features have a name and a description;
    `recipe.applies_to(feature)` says which pairs are cells."""

    name: str
    column: str  # what this table calls a feature
    measures: str  # what a cell's error is measured on
    recipes: tuple[Recipe, ...]
    features: tuple[Any, ...]
    groups: Callable[[Any, Device], Iterable[GroupSpec]]  # that a feature needs
    judge: Callable[[Recipe, Any, Backend, RunOptions], Judgement]
    gpu_features: tuple[Any, ...] = ()

    def features_of(self, device: Device | None) -> tuple[Any, ...]:
        """Returns the features that are judged on a device; None: on any device."""
        on_card = device is None or device.name == "cuda"
        return (*self.features, *self.gpu_features) if on_card else self.features

    def recipes_of(self, feature: Any) -> list[Recipe]:
        return [recipe for recipe in self.recipes if recipe.applies_to(feature)]


def engine_recipe(
    name: str, about: str, counters: list[str], of: str = "decoders", **told: Any
) -> Recipe:
    """Returns the recipe of an engine_recipes.toml entry."""
    return Recipe(name, about, partial(play_recipe, **told), tuple(counters), MODELS_OF[of])


ATTENTION = MatrixTable(
    name="attention",
    column="feature",
    measures="the output",
    recipes=RECIPES,
    features=FEATURES,
    groups=lambda feature, device: feature.on(device).groups(16),
    judge=attention_harness.judge,
    gpu_features=GPU_FEATURES,
)
ENGINE = MatrixTable(
    name="engine",
    column="model",
    measures="a log-probability",
    recipes=tuple(engine_recipe(name, **e) for name, e in table("engine_recipes.toml").items()),
    features=MODELS,
    groups=lambda tiny, device: loaded(tiny, device).model.groups(kv_dtype=device.dtype),
    judge=engine_harness.judge,
)
TABLES = (ATTENTION, ENGINE)
TABLE_OF = {recipe.name: table for table in TABLES for recipe in table.recipes}


@dataclass(frozen=True)
class Cell:
    backend: str
    recipe: str
    feature: str

    def __str__(self) -> str:
        return f"{self.backend}/{self.recipe}/{self.feature}"

    @staticmethod
    def parse(text: str) -> "Cell":
        """Parses `backend/recipe/feature`, as cells are printed everywhere."""
        parts = text.split("/")
        table = TABLE_OF.get(parts[1]) if len(parts) == 3 else None
        if table is None or parts[2] not in {f.name for f in table.features_of(None)}:
            rule = "a cell is backend/recipe/feature, like cpu/decode/window"
            raise RuleError(rule, repr(text), "See `lockstep lab run --list`")
        return Cell(*parts)

    @property
    def table(self) -> MatrixTable:
        return TABLE_OF[self.recipe]

    def pair(self) -> tuple[Recipe, Any]:
        """Returns the cell's Recipe and its feature (a `Feature` or a `Tiny`)."""
        recipe = next(r for r in self.table.recipes if r.name == self.recipe)
        return recipe, next(f for f in self.table.features_of(None) if f.name == self.feature)


@dataclass(frozen=True)
class Result:
    """The outcome of a cell. `verdict` is passed, refused, known or failed."""

    cell: Cell
    verdict: str
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    out_error: float = 0.0
    lse_error: float = 0.0
    tolerance_used: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    device: Device = CPU

    def as_json(self) -> dict[str, object]:
        """Returns the cell as `lab run --json` writes it."""
        cell = self.cell
        command = f"lockstep lab run --backend {cell.backend} --recipe {cell.recipe}"
        command += f" --feature {cell.feature}{self.device.flags}"
        named = {"cell": str(cell), "command": command, "dtype": self.device.dtype}
        return {**asdict(self), **asdict(cell), **named}


def cells(backends: Sequence[str], device: Device = CPU) -> list[Cell]:
    """Returns every applicable cell on a device, in the order of the matrix."""
    asked = [(table, f) for table in TABLES for f in table.features_of(device)]
    pairs = [(r.name, f.name) for table, f in asked for r in table.recipes_of(f)]
    return [Cell(backend, recipe, feature) for recipe, feature in pairs for backend in backends]


def refusal(cell: Cell, backend: Backend, device: Device = CPU) -> str | None:
    """Returns the reason why the backend's caps refuse this cell, or None. Engine cells need a
    backend that promises bits; a recipe with trees needs one that supports tails."""
    recipe, feature = cell.pair()
    if cell.table is ENGINE and not backend.caps.invariances:
        return "it promises no bits, and the engine's cells compare bits"
    tails = any(name.startswith("tail") for name in recipe.required_counters)
    given = device.place.type, tails, device.dtype
    groups = cell.table.groups(feature, device)
    reasons = (select.refusal(backend.caps, group, *given) for group in groups)
    return next(filter(None, reasons), None)


def run_cell(cell: Cell, options: RunOptions = FULL) -> Result:
    """Judges one cell. An exception of the code under test is a finding, not the run's end."""
    backend, device = select.load(cell.backend), options.device
    reason = refusal(cell, backend, device)
    if reason is not None:
        return Result(cell, "refused", reason)
    begin = time.perf_counter()
    try:
        j = cell.table.judge(*cell.pair(), backend, options)
    except Exception as error:  # whatever a broken backend raises is a finding of its cell
        j = Judgement()
        j.note_error(error)
    verdict, reason = "passed", ""
    if broken := [finding for finding in j.findings if not finding.held]:
        verdict, reason = "failed", f"{broken[0].name}: {broken[0].detail}"
    return Result(
        cell=cell,
        verdict=verdict,
        reason=reason,
        findings=j.findings,
        out_error=j.out_error,
        lse_error=j.lse_error,
        tolerance_used=j.tolerance_used,
        counters=dict(j.counters),
        seconds=time.perf_counter() - begin,
        device=device,
    )


def apply_known_failures(result: Result, quick: bool, known: Mapping[str, str] = KNOWN) -> Result:
    """Applies the known failures to a verdict. A known failure does not fail the run; one that
    passes does, until it is removed from the list. A quick run checks fewer properties, so a pass
    there proves nothing."""
    cause = known.get(str(result.cell))
    if cause is None or (quick and result.verdict != "failed"):
        return result
    if result.verdict == "failed":
        return replace(result, verdict="known", reason=f"{cause} ({result.reason})")
    reason = f"{result.verdict}, but listed in KNOWN of lab/cells.py ({cause}): remove it there"
    return replace(result, verdict="failed", reason=reason)


@dataclass(frozen=True)
class CellTask:
    """Cells that one process judges one after another, with a bug put back or without."""

    cells: tuple[Cell, ...]
    options: RunOptions = FULL
    revert: str = ""


def run(todo: Iterable[Cell], options: RunOptions = FULL, workers: int = 2) -> Iterator[Result]:
    """Judges cells and yields results as they are ready. The cells of one recipe and feature run
    together: their script, numbers and answers are computed once."""
    pairs = groupby(todo, key=lambda cell: (cell.recipe, cell.feature))
    tasks = [CellTask(tuple(group), options) for _, group in pairs]
    for _, results in run_tasks(tasks, workers):
        yield from results


def run_tasks(
    tasks: Sequence[CellTask], workers: int, cell_s: float = CELL_S
) -> Iterator[tuple[CellTask, list[Result]]]:
    """Runs tasks in worker processes, or in this one if `workers` is 0. The cells of a task that
    died are run again one by one, so that the crash is attributed to one cell."""
    if workers < 1:
        yield from ((task, run_task(task)) for task in tasks)
        return
    alone: list[CellTask] = []
    for task, answer in isolate.run(run_task, tasks, workers, lambda t: cell_s * len(t.cells)):
        if not isinstance(answer, isolate.Died):
            yield task, answer
        elif answer.code == LOST:
            alone.append(task)
        elif len(task.cells) > 1:
            alone += [replace(task, cells=(cell,)) for cell in task.cells]
        else:
            crash = Finding("crash", False, answer.reason)
            yield task, [Result(task.cells[0], "failed", f"crash: {answer.reason}", (crash,))]
    if alone:
        yield from run_tasks(alone, workers, cell_s)


def run_task(task: CellTask) -> list[Result]:
    """Judges cells in a worker process. One whose device was lost exits, another takes over."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(LOST)
    with reverts.swapped(reverts.load(task.revert)) if task.revert else nullcontext():
        return [run_cell(cell, task.options) for cell in task.cells]


def case(revert: Revert) -> dict[str, Any]:
    """Returns a case file as data, without measurements."""
    return {key: value for key, value in vars(revert).items() if key != "make"}


def run_reverts(
    chosen: Sequence[Revert], backend: str, workers: int, device: Device = CPU
) -> dict[str, Any]:
    """Runs every revert in each of its cells. In the result, `red` lists cells that fail without a
    bug, and `unproven` the bugs that the backend is not proven against, with the reason."""
    begin, todo = time.perf_counter(), list[CellTask]()
    for revert in chosen:
        reverts.resolve(revert.target)  # raises before the run if a target no longer exists
    asked = {revert.name: cells_of(revert, backend, device) for revert in chosen}
    bugs = [(name, c, cell) for name, (where, _) in asked.items() for cell in where for c in BOTH]
    for name, checks, cell in (*dict.fromkeys(("", True, cell) for _, _, cell in bugs), *bugs):
        options = RunOptions(device=device, checks=checks, quick=True)
        todo.append(CellTask((Cell.parse(f"{backend}/{cell}"),), options, name))
    results: dict[tuple[str, bool, str], Result] = {}
    with Progress(len(todo), "lab reverts") as bar:
        for task, (result,) in run_tasks(todo, workers, REVERT_S):
            cell = f"{result.cell.recipe}/{result.cell.feature}"
            results[task.revert, task.options.checks, cell] = result
            bad = (result.verdict == "passed") == bool(task.revert)
            bar.step(task.revert or str(result.cell), bad)
    kills = []
    for revert in chosen:
        where, unasked = asked[revert.name]
        found = [(c, cell, results[revert.name, c, cell]) for c in BOTH for cell in where]
        kills.append(kill(revert, found, unasked))
    baseline = {cell: result for (name, _, cell), result in results.items() if not name}
    return {
        "reverts": kills,
        "baseline": {cell: result.as_json() for cell, result in baseline.items()},
        "red": [cell for cell, result in baseline.items() if result.verdict != "passed"],
        "unproven": {
            k["name"]: k["unasked"] or f"a cell stays green with the bug in {k['target']}"
            for k in kills
            if not k["killed"]
        },
        "seconds": round(time.perf_counter() - begin, 2),
    }


def kill(revert: Revert, found: Sequence[tuple[bool, str, Result]], unasked: str) -> dict[str, Any]:
    """Summarizes a revert: whether all cells killed it, and by which rules and properties."""
    rules: dict[str, None] = {}
    by: dict[bool, dict[str, None]] = {checks: {} for checks in BOTH}
    trials = []
    for checks, cell, result in found:
        broken = [f for f in result.findings if not f.held]
        killed = any(proves_kill(f, revert, checks) for f in broken)
        trial = {"cell": cell, "checks": checks, "killed": killed, "verdict": result.verdict}
        trials.append({**trial, "broken": list(map(asdict, broken))})
        for finding in broken:
            by[checks]["guard" if finding.rule else finding.name] = None
            if checks and finding.rule:
                rules[finding.rule] = None
    return {
        **case(revert),
        "unasked": unasked,
        "killed": bool(revert.equivalent or trials) and all(t["killed"] for t in trials),
        "rules": list(rules),
        "by_on": list(by[True]),
        "by_off": list(by[False]),
        "trials": trials,
    }


def proves_kill(finding: Finding, revert: Revert, checks: bool) -> bool:
    """Returns whether this finding proves that the lab noticed the bug."""
    if finding.name in ("raised", "crash"):
        return revert.crash
    return checks or not finding.rule


def cells_of(revert: Revert, backend: str, device: Device) -> tuple[tuple[str, ...], str]:
    """Returns the cells in which a bug must be noticed, and the reason if there are none."""
    if revert.equivalent:
        return (), ""
    if revert.backend not in ("", backend):
        return (), f"a bug in the code of {revert.backend}"
    made = select.load(backend)
    reasons = {c: refusal(Cell.parse(f"{backend}/{c}"), made, device) for c in revert.cells}
    taken = tuple(cell for cell, reason in reasons.items() if reason is None)
    return taken, "" if taken else f"its cells are refused: {next(iter(reasons.values()))}"
