"""What must hold in a cell, and how it is found out.

One run of the recipe is compared with the float64 answer and with the plain way of computing the
same tokens: each path alone, whole, cold. Then it is run again with other chunks, pages, padding
and threads, none of which may change a bit. Memory is inspected in the first run.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.lab import oracle, table
from lockstep.lab.attention_harness import AttentionHarness, Record, Setting
from lockstep.lab.features import FEATURES, GPU_FEATURES, Feature
from lockstep.lab.guard import as_bits
from lockstep.lab.options import CPU, FULL, Device, RunOptions
from lockstep.lab.recipes import RECIPES, Recipe, Script, alone, chunked, plain, write

HELD = table("properties.toml")
# first word of a fault: the property it breaks
MEMORY = ("plan", "rules", "writes", "guards", "pages", "pads", "repeat")


@dataclass(frozen=True)
class Finding:
    """One property of one cell: it held, or it did not and `detail` says where."""

    name: str
    held: bool
    detail: str


@dataclass
class Judgement:
    """What was found in a cell, by property, its measured error, and what really happened."""

    faults: dict[str, list[str]] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    out_error: float = 0.0
    lse_error: float = 0.0
    tolerance_used: float = 0.0  # largest error as a fraction of what is allowed
    counters: Counter[str] = field(default_factory=Counter)

    def note(self, name: str, faults: Iterable[str], held: str = "") -> None:
        """Something was looked at: what speaks against the property, and what it rests on."""
        self.faults.setdefault(name, []).extend(faults)
        self.held[name] = held or self.held.get(name) or HELD.get(name, "")

    def check(self, name: str, holds: bool, fault: str, held: str = "") -> None:
        """One thing was looked at: `fault` says what is wrong where it does not hold."""
        self.note(name, [] if holds else [fault], held)

    def require(self, names: Iterable[str]) -> None:
        """The counters say that what the recipe is about really happened."""
        missed = [f"{name} is 0" for name in names if not self.counters[name]]
        self.note("paths", missed, ", ".join(names))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """One per property; what raised comes last."""
        names = sorted(self.faults, key=lambda name: name == "raised")
        told = {name: "; ".join(self.faults[name][:3]) for name in names}
        return tuple(Finding(n, not self.faults[n], told[n] or self.held[n]) for n in names)


@lru_cache(maxsize=64)
def material(
    recipe: str, feature: str, device: Device = CPU
) -> tuple[Script, list[list[oracle.Rows]], list[list[oracle.Answer]]]:
    """The story, the numbers and the answers of a cell; the same for every backend."""
    chosen = next(f for f in (*FEATURES, *GPU_FEATURES) if f.name == feature).on(device)
    script = write(next(r for r in RECIPES if r.name == recipe), chosen)
    rows = oracle.values(chosen.groups(16), len(script.parents), dtype=device.compute)
    rows = oracle.overflowed(rows, script.infinite)
    return script, rows, oracle.answers(chosen, script, rows, device.unit)


def judge(
    recipe: Recipe, feature: Feature, backend: Backend, options: RunOptions = FULL
) -> Judgement:
    """Runs one cell. Raises only what the code under test raises."""
    cell = AttentionCell(recipe, feature, backend, options)
    main = cell.run(cell.script, inspect=True)
    cell.counters = Counter({name: int(count) for name, count in main.counters.items()})
    cell.judge_values(main)
    cell.require(recipe.required_counters)
    padded = cell.run(cell.script, inspect=True, pad=True)
    if not padded.counters["pad_rows"] and main.counters["rows"]:
        cell.note("paths", ["nothing was padded"])
    if backend.caps.invariances:
        cell.judge_bits(main, padded, options.quick)
    for name in MEMORY:
        found = [f.partition(": ")[2] for f in cell.memory if f.startswith(name + ":")]
        cell.note(name, found, f"{main.counters['steps']} steps, and in every other run")
    return cell


class AttentionCell(Judgement):
    """A recipe on a feature, run in every way that may not change a bit."""

    def __init__(
        self, recipe: Recipe, feature: Feature, backend: Backend, options: RunOptions
    ) -> None:
        super().__init__()
        self.script, self.rows, self.answers = material(recipe.name, feature.name, options.device)
        self.feature, self.backend = feature.on(options.device), backend
        self.setting = Setting(checks=options.checks, device=options.device)
        self.memory: list[str] = []  # what was wrong in any of the runs

    def run(self, story: Script, **setting: Any) -> Record:
        how = replace(self.setting, **setting)
        record = AttentionHarness(self.feature, story, self.rows, self.backend, how).run()
        self.memory += record.faults
        return record

    def judge_values(self, main: Record) -> None:
        """Against float64, within the derived tolerance; a NaN is a slot nobody wrote."""
        errors = {"value": 0.0, "lse": 0.0}
        for g, layers in enumerate(self.answers):
            seen = main.seen[g]
            for layer, answer in enumerate(layers):
                where = f"group {g} layer {layer}:"
                for name, have, want, tol in (
                    ("value", main.out[g][layer], answer.out, answer.out_tol[..., None]),
                    ("lse", main.lse[g][layer], answer.lse, answer.lse_tol),
                ):
                    distance = off(have[seen].double(), want[seen])
                    shares = (distance / tol[seen]).nan_to_num(torch.inf, torch.inf)
                    error, used = (float(t.max()) if t.numel() else 0.0 for t in (distance, shares))
                    errors[name] = max(errors[name], error)
                    self.tolerance_used = max(self.tolerance_used, used)
                    fault = f"{where} off by {error:.3g}, {used:.3g} of the tolerance"
                    self.check(name, used <= 1, fault, f"max error {errors[name]:.3g}")
                    finite = not bool(have[seen].isnan().any())
                    self.check("poison", finite, f"{where} NaN in {name}")
        self.out_error, self.lse_error = errors["value"], errors["lse"]

    def judge_bits(self, main: Record, padded: Record, quick: bool) -> None:
        """Every other way to run the recipe, and the recipe itself, against the plain way."""
        script, want = self.script, self.run(plain(self.script), seed=5)

        def compare(name: str, told: str, *records: Record, tokens: set[int] | None = None) -> None:
            if ("batch" if name == "alone" else name) in self.backend.caps.invariances:
                pairs = (diff for record in records for diff in _differences(record, want, tokens))
                self.note(name, pairs, told)

        for kind, tokens in sorted(main.kinds.items()):
            told = f"{len(tokens)} rows equal alone, whole and cold"
            compare(kind, told, main, tokens=tokens)
        if not self.feature.fresh:
            cut = chunked(script, 7)
            if len(cut.steps) > len(script.steps):
                told = f"{len(cut.steps)} steps for {len(script.steps)}"
                compare("chunk", told, self.run(cut))
            sizes = (1, 64) if quick else (1, 2, 64)
            paged = [self.run(script, page_size=size) for size in sizes]
            compare("page", f"page sizes {sizes}", *paged)
        compare("pad", f"{padded.counters['pad_rows']} pad rows", padded)
        compare("threads", "1 and 2 threads", self.run(script, threads=1))
        if not quick:
            each = [self.run(alone(script, r)) for r in script.lineage]
            compare("alone", f"{len(each)} requests by themselves", *each)


def off(have: Tensor, want: Tensor) -> Tensor:
    """Distance, with infinity for what is no number."""
    distance = torch.where(have == want, 0.0, (have - want).abs())
    return distance.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _differences(have: Record, want: Record, tokens: set[int] | None) -> list[str]:
    """Rows, among `tokens`, whose bits differ. A NaN equals nothing, not even itself."""
    found = []
    for g, seen in enumerate(have.seen):
        both = seen & want.seen[g]
        if tokens is not None:
            both &= torch.tensor([uid in tokens for uid in range(len(both))])
        for layer in range(len(have.out[g])):
            for name, a, b in (("out", have.out, want.out), ("lse", have.lse, want.lse)):
                x, y = a[g][layer][both], b[g][layer][both]
                off = ((as_bits(x) != as_bits(y)) | x.isnan()).flatten(1).any(1)
                if bool(off.any()):
                    count, first = int(off.sum()), int(both.nonzero()[off][0])
                    rows = f"{count} of {len(off)} rows differ in {name}, first token {first}"
                    found.append(f"group {g} layer {layer}: {rows}")
    return found
