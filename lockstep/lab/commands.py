"""`lockstep lab ...` and `lockstep check-env`: each command runs something, writes the requested
files, and prints a short report. `cli` calls them with parsed arguments."""

import time
from argparse import Namespace
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from lockstep import outfile
from lockstep.attention import select
from lockstep.kernels.cpu import cache
from lockstep.lab import cells, document, pages, reverts, show
from lockstep.lab.cells import ENGINE, TABLES
from lockstep.lab.options import FULL, Device, RunOptions
from lockstep.progress import Progress
from lockstep.types import RuleError

BACKENDS = ("cpu", "reference")
# besides dense, which is run with every recipe
QUICK_FEATURES = {"group-7", "window-sinks", "bf16-kv", "latent", "cross", "head-20", "embed"}
QUICK_RECIPES = {"decode", "mixed", "verify-tree", "fork", "window-edges", "encode-decode"}
QUICK_RECIPES |= {"embed", "embed-long"}
QUICK_MODEL, QUICK_SAMPLER = "qwen3", ("sample", "seeds")  # in the engine's table


def options_of(args: Namespace) -> RunOptions:
    return RunOptions(
        device=Device.of(args.device, args.dtype),
        checks=not vars(args).get("no_checks"),
        quick=bool(vars(args).get("quick")),
    )


def run(args: Namespace) -> int:
    """Runs `lab run`."""
    todo = chosen_cells(args)
    if args.list:
        for cell in todo:
            recipe, feature = cell.pair()
            print(f"{cell!s:<40} {recipe.description}; {feature.description}")
        return 0
    doc = judged(todo, args.workers, options_of(args))
    if args.html:
        doc["cases"] = [cells.case(reverts.load(name)) for name in reverts.names()]
    _publish(args, doc, document.text("run.txt", doc=doc))
    return int(doc["summary"]["failed"] > 0)


def judged(todo: Sequence[cells.Cell], workers: int, options: RunOptions) -> document.Document:
    """Runs cells under a progress bar and returns their document."""
    begin = time.perf_counter()
    results: dict[cells.Cell, cells.Result] = {}
    with Progress(len(todo), "lab run") as bar:
        for result in cells.run(todo, options, workers):
            settled = cells.apply_known_failures(result, options.quick)
            results[settled.cell] = settled
            bar.step(str(settled.cell), settled.verdict == "failed")
    kept = [results[cell].as_json() for cell in todo]
    seconds = time.perf_counter() - begin
    return document.run_document(kept, options.quick, seconds, checks=options.checks)


def kills(args: Namespace) -> int:
    """Runs `lab reverts`. For a backend that is not ours, an unproven bug is reported and is no
    failure."""
    every = reverts.names()
    names = picked("a revert is a file in lab/reverts", args.name, every) or every
    chosen = [reverts.load(name) for name in names]
    if args.list:
        for revert in chosen:
            cells_of = ", ".join(revert.cells) or "equivalent"
            print(f"{revert.name}: {revert.title}\n    {revert.target}; {cells_of}")
        return 0
    picked_backends([args.backend])
    device = Device.of(args.device, args.dtype)
    earlier = _read(args.source) if args.source else None
    found = cells.run_reverts(chosen, args.backend, args.workers, device)
    ran = earlier or {"cells": found["baseline"].values(), "quick": True}
    doc = document.run_document(ran["cells"], ran["quick"], found["seconds"], kills=found)
    _publish(args, doc, document.text("reverts.txt", kills=found, backend=args.backend))
    ours = args.backend == BACKENDS[0]
    return int(bool(found["red"] or (ours and found["unproven"])))


def matrix(args: Namespace) -> int:
    """Runs `lab matrix`."""
    backends, folder = picked_backends(args.backend), Path(args.docs)
    if not folder.is_dir():
        got, remedy = f"{args.docs}: no such folder", "Run this at the root of the repository"
        raise RuleError("--docs is an existing folder", got, remedy)
    for name in () if args.check else pages.FILES:
        outfile.check("--docs", str(folder / name))
    if args.source:
        verdicts = pages.ran(_read(args.source), backends)
    elif args.check:
        verdicts = pages.promised(backends)
    else:
        doc = judged(cells.cells(backends), args.workers, FULL)
        print("\n".join(document.text("run.txt", doc=doc)))
        verdicts = pages.ran(doc, backends)
    wanted = pages.markdown(verdicts)
    if args.check:
        wrong = pages.stale(folder, wanted)
        told = [*wrong, "run `lockstep lab matrix`"]
        if not wrong:
            told = [f"{', '.join(wanted)}: up to date"]
        print("\n".join(told))
        return int(bool(wrong))
    for name, text in wanted.items():
        outfile.write(str(folder / name), text)
        print(f"wrote {folder / name}")
    return int(any(verdict == "failed" for verdict, _ in verdicts.values()))


def cell_story(args: Namespace) -> int:
    """Runs `lab show`."""
    cell, options = cells.Cell.parse(args.cell), options_of(args)
    steps = show.story(cell, options)
    if args.step is not None and not 0 <= args.step < len(steps):
        rule = f"--step is from 0 to {len(steps) - 1}, the last step of {cell}"
        raise RuleError(rule, str(args.step), "Pick one of these")
    kept = [s for s in steps if args.step in (None, s["step"])]
    doc = {"cell": str(cell), "checks": options.checks, "steps": kept}
    document.publish(args, doc, [show.text(cell, steps, args.step)])
    return 0


def check_env(args: Namespace) -> int:
    """Runs `check-env`. Kernels use as many threads as torch."""
    folder = cache.folder()
    count = len(list(folder.rglob("*.nbc")))
    compiled = f"{count} compiled" if count else "nothing yet: the first run compiles"
    found: document.Document = {
        "environment": document.environment(),
        "threads": torch.get_num_threads(),
        "kernels": f"{folder} ({compiled})",
        "backends": {name: inspect_backend(name) for name in select.names()},
    }
    document.publish(args, found, document.text("check-env.txt", doc=found))
    return 0


def inspect_backend(name: str) -> dict[str, Any]:
    """Returns what a backend states, or why it cannot be loaded."""
    try:
        caps = select.load(name).caps
    except Exception as error:  # another package's import may raise anything: shown as the reason
        return {"available": False, "reason": f"{type(error).__name__}: {error}"}
    invariances = ", ".join(sorted(caps.invariances))
    bits = f"bits promised over {invariances}" if invariances else "values only"
    reason = f"{', '.join(sorted(caps.devices))}; order {caps.order}; {bits}"
    return {"available": True, "reason": reason}


def chosen_cells(args: Namespace) -> list[cells.Cell]:
    """Returns the cells that the options select."""
    backends, device = picked_backends(args.backend), Device.of(args.device, args.dtype)
    every = [r.name for table in TABLES for r in table.recipes]
    recipes = picked("--recipe names recipes of the lab", args.recipe, every)
    every = [f.name for table in TABLES for f in table.features_of(device)]
    features = picked("--feature names features of the lab", args.feature, every)
    found = cells.cells(backends, device=device)
    if args.quick and not recipes and not features:
        found = [c for c in found if quick(c)]
    found = [c for c in found if not recipes or c.recipe in recipes]
    found = [c for c in found if not features or c.feature in features]
    if not found:
        rule, got = "a recipe applies to its feature", f"{args.recipe} and {args.feature}"
        raise RuleError(rule, got, "See `lockstep lab run --list`")
    return found


def quick(cell: cells.Cell) -> bool:
    """All recipes on a plain feature, a few on others; every engine recipe on one model."""
    if cell.table is ENGINE:
        return cell.feature == QUICK_MODEL or cell.recipe in QUICK_SAMPLER
    few = cell.feature in QUICK_FEATURES and cell.recipe in QUICK_RECIPES
    return few or cell.feature == "dense"


def picked_backends(given: list[str] | None) -> list[str]:
    """Returns the backends that --backend names (default: ours), after loading each."""
    chosen = picked("a backend is installed", given, select.names()) or list(BACKENDS)
    for name in chosen:
        select.load(name)  # fails here with a one-line reason, not in every worker process
    return chosen


def picked(rule: str, given: list[str] | None, allowed: Sequence[str]) -> list[str]:
    """Returns the values of a repeatable option, split at commas and checked."""
    values = list(dict.fromkeys(part for text in given or [] for part in text.split(",") if part))
    for value in values:
        if value not in allowed:
            close = get_close_matches(value, allowed, 1)
            remedy = f"Did you mean {close[0]}?" if close else f"There are {', '.join(allowed)}"
            raise RuleError(rule, repr(value), remedy)
    return values


def _publish(args: Namespace, doc: document.Document, lines: list[str]) -> None:
    if args.html:
        outfile.write(args.html, pages.html(doc))
        lines = [*lines, f"open {args.html}"]
    document.publish(args, doc, lines)


def _read(where: str) -> document.Document:
    return document.read(where, "lockstep lab run", "cells", "environment", "summary")
