"""What must hold in a cell, and how it is found out.

One run of the recipe is compared with the float64 answer and with the plain way of computing the
same tokens: each path alone, whole, cold. Every row must have the same bits, however it came about.
Then the recipe is run again with other chunks, pages, padding and threads, none of which may change
a bit. Memory is inspected in the first run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.lab import oracle
from lockstep.lab.attention_harness import AttentionHarness, Record, Setting
from lockstep.lab.features import FEATURES, Feature
from lockstep.lab.guard import as_bits
from lockstep.lab.options import CPU, FULL, Device, RunOptions
from lockstep.lab.recipes import RECIPES, Recipe, write
from lockstep.lab.script import Script, alone, chunked, plain

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
        """Something was looked at: what speaks against the property, if anything, and what it rests
        on."""
        self.faults.setdefault(name, []).extend(faults)
        self.held[name] = held or self.held.get(name, "")

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
    chosen = next(f for f in FEATURES if f.name == feature).on(device)
    script = write(next(r for r in RECIPES if r.name == recipe), chosen)
    rows = oracle.values(chosen.groups(16), len(script.parents), dtype=device.compute)
    rows = oracle.overflowed(rows, script.infinite)
    return script, rows, oracle.answers(chosen, script, rows, device.unit)


def judge(
    recipe: Recipe, feature: Feature, backend: Backend, options: RunOptions = FULL
) -> Judgement:
    """Runs one cell. Raises only what the code under test raises."""
    script, rows, answers = material(recipe.name, feature.name, options.device)
    feature = feature.on(options.device)
    result, faults = Judgement(), list[str]()
    plainly = Setting(checks=options.checks, device=options.device)

    def run(story: Script, **setting: object) -> Record:
        how = replace(plainly, **setting)  # type: ignore[arg-type]
        record = AttentionHarness(feature, story, rows, backend, how).run()
        faults.extend(record.faults)
        return record

    main = run(script, inspect=True)
    result.counters = Counter({name: int(count) for name, count in main.counters.items()})
    values(result, main, answers)
    result.require(recipe.required_counters)
    padded = run(script, inspect=True, pad=True)
    if not padded.counters["pad_rows"] and main.counters["rows"]:
        result.note("paths", ["nothing was padded"])
    if backend.caps.invariances:
        done = {"main": main, "pad": padded}
        bits(result, (feature, script, backend), run, done, options.quick)
    memory(result, faults, main.counters["steps"])
    return result


def values(result: Judgement, main: Record, answers: list[list[oracle.Answer]]) -> None:
    """Outputs and LSE against float64, within the derived tolerance; a NaN is a slot nobody
    wrote."""
    errors = {"value": 0.0, "lse": 0.0}
    for g, layers in enumerate(answers):
        seen = main.seen[g]
        for layer, answer in enumerate(layers):
            where = f"group {g} layer {layer}:"
            for name, have, want, tol in (
                ("value", main.out[g][layer], answer.out, answer.out_tol[..., None]),
                ("lse", main.lse[g][layer], answer.lse, answer.lse_tol),
            ):
                error, used = _error(have[seen], want[seen], tol[seen])
                errors[name] = max(errors[name], error)
                result.tolerance_used = max(result.tolerance_used, used)
                fault = f"{where} off by {error:.3g}, {used:.3g} of the tolerance"
                result.check(name, used <= 1, fault, f"max error {errors[name]:.3g}")
                finite = not bool(have[seen].isnan().any())
                result.check("poison", finite, f"{where} NaN in {name}", "no NaN was read")
    result.out_error, result.lse_error = errors["value"], errors["lse"]


def memory(result: Judgement, faults: list[str], steps: int) -> None:
    """In every run: plans that say what they should and survive packing, exact writes, intact guard
    bands, pages that come back."""
    for name in MEMORY:
        found = [f.partition(": ")[2] for f in faults if f.startswith(name + ":")]
        result.note(name, found, f"{steps} steps, and in every other run")


def bits(
    result: Judgement,
    what: tuple[Feature, Script, Backend],
    run: Callable[..., Record],
    done: dict[str, Record],
    quick: bool,
) -> None:
    """Bitwise equality with the plain way, for the recipe itself and for every other way to run
    it."""
    feature, script, backend = what
    main, padded = done["main"], done["pad"]
    want = run(plain(script), seed=5)
    promised = backend.caps.invariances

    def compare(name: str, records: Iterable[Record], tokens: set[int] | None, told: str) -> None:
        if ("batch" if name == "alone" else name) in promised:
            pairs = [diff for record in records for diff in _differences(record, want, tokens)]
            result.note(name, pairs, told)

    for kind, tokens in sorted(main.kinds.items()):
        compare(kind, [main], tokens, f"{len(tokens)} rows equal alone, whole and cold")
    cut = chunked(script, 7)
    if len(cut.steps) > len(script.steps) and not feature.fresh:
        compare("chunk", [run(cut)], None, f"{len(cut.steps)} steps for {len(script.steps)}")
    if not feature.fresh:
        sizes = (1, 64) if quick else (1, 2, 64)
        compare("page", [run(script, page_size=p) for p in sizes], None, f"page sizes {sizes}")
    compare("pad", [padded], None, f"{padded.counters['pad_rows']} pad rows")
    compare("threads", [run(script, threads=1)], None, "1 and 2 threads")
    if not quick:
        each = [run(alone(script, r)) for r in script.lineage]
        compare("alone", each, None, f"{len(each)} requests by themselves")


def off(have: Tensor, want: Tensor) -> Tensor:
    """Distance, with infinity for what is no number."""
    distance = torch.where(have == want, 0.0, (have - want).abs())
    return distance.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _error(have: Tensor, want: Tensor, tol: Tensor) -> tuple[float, float]:
    """Largest absolute error and largest fraction of the tolerance; NaN where the answer is a
    number counts as infinite."""
    if have.numel() == 0:
        return 0.0, 0.0
    error = off(have.double(), want)
    used = (error / tol).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(error.max()), float(used.max())


def _differences(have: Record, want: Record, tokens: set[int] | None) -> list[str]:
    """Rows, among `tokens`, whose bits differ. A NaN equals nothing: two runs that are wrong alike
    do not agree."""
    found = []
    for g, seen in enumerate(have.seen):
        both = seen & want.seen[g]
        if tokens is not None:
            chosen = torch.zeros_like(both)
            chosen[list(tokens)] = True
            both = both & chosen
        for layer in range(len(have.out[g])):
            for name, a, b in (("out", have.out, want.out), ("lse", have.lse, want.lse)):
                x, y = a[g][layer][both], b[g][layer][both]
                off = ((as_bits(x) != as_bits(y)) | x.isnan()).flatten(1).any(1)
                if bool(off.any()):
                    first = int(both.nonzero()[off][0])
                    found.append(
                        f"group {g} layer {layer}: {int(off.sum())} of {len(off)} rows differ in "
                        f"{name}, first token {first}"
                    )
    return found
