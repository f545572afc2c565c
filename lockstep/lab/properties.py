"""What must hold in a cell, and how it is found out.

One run of the recipe is compared with the float64 answer and with the plain way of computing the
same tokens: each path alone, whole, cold. Every row must have the same bits, however it came about.
Then the recipe is run again with other chunks, pages, padding and threads, none of which may change
a bit. Memory is inspected in the first run.
"""

from __future__ import annotations

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
    """All findings of a cell, its measured error, and the counters of its runs."""

    findings: list[Finding] = field(default_factory=list)
    out_error: float = 0.0
    lse_error: float = 0.0
    tolerance_used: float = 0.0  # largest error as a fraction of what is allowed
    counters: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, faults: list[str], held: str) -> None:
        """Records a property with what speaks against it, or with what it is based on."""
        self.findings.append(Finding(name, not faults, "; ".join(faults[:3]) if faults else held))

    def require(self, names: Iterable[str]) -> None:
        """The counters say that what the recipe is about really happened."""
        missed = [f"{name} is 0" for name in names if not self.counters.get(name)]
        self.add("paths", missed, ", ".join(names))


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
    result.counters = {name: int(count) for name, count in main.counters.items()}
    values(result, main, answers)
    result.require(recipe.required_counters)
    padded = run(script, inspect=True, pad=True)
    if not padded.counters["pad_rows"] and main.counters["rows"]:
        result.add("paths", ["nothing was padded"], "")
    if backend.caps.invariances:
        done = {"main": main, "pad": padded}
        bits(result, (feature, script, backend), run, done, options.quick)
    memory(result, faults, main.counters["steps"])
    return result


def values(result: Judgement, main: Record, answers: list[list[oracle.Answer]]) -> None:
    """Outputs and LSE against float64, within the derived tolerance; a NaN is a slot nobody
    wrote."""
    faults: dict[str, list[str]] = {"value": [], "lse": [], "poison": []}
    for g, layers in enumerate(answers):
        seen = main.seen[g]
        for layer, answer in enumerate(layers):
            for name, have, want, tol in (
                ("value", main.out[g][layer], answer.out, answer.out_tol[..., None]),
                ("lse", main.lse[g][layer], answer.lse, answer.lse_tol),
            ):
                error, used = _error(have[seen], want[seen], tol[seen])
                if name == "value":
                    result.out_error = max(result.out_error, error)
                else:
                    result.lse_error = max(result.lse_error, error)
                result.tolerance_used = max(result.tolerance_used, used)
                if not used <= 1:
                    faults[name].append(
                        f"group {g} layer {layer}: off by {error:.3g}, {used:.3g} of the tolerance"
                    )
                if bool(have[seen].isnan().any()):
                    faults["poison"].append(f"group {g} layer {layer}: NaN in {name}")
    rows = int(sum(int(s.sum()) for s in main.seen))
    result.add("value", faults["value"], f"max error {result.out_error:.3g}")
    result.add("lse", faults["lse"], f"max error {result.lse_error:.3g}")
    result.add("poison", faults["poison"], f"{rows} rows finite")


def memory(result: Judgement, faults: list[str], steps: int) -> None:
    """In every run: plans that say what they should and survive packing, exact writes, intact guard
    bands, pages that come back."""
    for name in MEMORY:
        found = [f.partition(": ")[2] for f in faults if f.startswith(name + ":")]
        result.add(name, found, f"{steps} steps, and in every other run")


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
            result.add(name, pairs, told)

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
