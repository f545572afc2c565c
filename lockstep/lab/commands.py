"""`lockstep lab ...`: each command runs something, writes what was asked for, and prints a short
account of it.

Takes parsed arguments and returns an exit code; knows no options by name beyond these and no
parser. `cli` calls it. Machines read the JSON document, people read these lines; with `--json -`
stdout holds the document alone and the lines go to stderr.
"""

from __future__ import annotations

import sys
import textwrap
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from lockstep import outfile
from lockstep.attention import select
from lockstep.lab import cells, document, kill, known, matrix, report, reverts, show
from lockstep.lab.sheets import ENGINE, SHEETS
from lockstep.progress import Progress
from lockstep.types import RuleError

BACKENDS = ("cpu", "reference")
QUICK_FEATURES = (
    "group-7",
    "window-sinks",
    "bf16-kv",
    "latent",
    "cross",
    "head-20",
    "embed",
)  # besides dense, which is run in full
QUICK_RECIPES = (
    "decode",
    "mixed",
    "verify-tree",
    "fork",
    "window-edges",
    "encode-decode",
    "embed",
    "embed-long",
)
QUICK_MODEL, QUICK_SAMPLER = "qwen3", ("sample", "seeds")  # of the engine's table


def run(args: Namespace) -> int:
    """`lab run`."""
    todo = chosen_cells(args)
    if args.list:
        return _list_cells(todo)
    begin = time.perf_counter()
    doc = judged(todo, args, begin)
    _write(args, doc)
    _say(args, run_lines(doc))
    _open(args)
    return 1 if doc["summary"]["failed"] else 0


def judged(todo: Sequence[cells.Cell], args: Namespace, begin: float) -> document.Document:
    """Runs cells under a progress bar."""
    results: dict[cells.Cell, cells.Result] = {}
    with Progress(len(todo), "lab run") as bar:
        for result in cells.run(todo, args.quick, args.workers, not args.no_checks):
            settled = known.settle(result, args.quick)
            results[settled.cell] = settled
            bar.step(str(settled.cell), settled.verdict == "failed")
    kept = [results[cell].as_json() for cell in todo]
    more = (
        {"checks": not args.no_checks, "cases": cases()}
        if args.html
        else {"checks": not args.no_checks}
    )
    return document.document(kept, args.quick, time.perf_counter() - begin, **more)


def traces(args: Namespace) -> int:
    """`lab fuzz`."""
    from lockstep.lab import fuzz, isolate
    from lockstep.lab.environment import environment

    begin, last = time.perf_counter(), args.first + args.traces
    jobs = [range(i, min(i + 10, last)) for i in range(args.first, last, 10)]
    faults: list[str] = []
    happened: Counter[str] = Counter()
    with Progress(len(jobs), "lab fuzz") as bar:
        for job, answer in isolate.run(fuzz.play_some, jobs, max(1, args.workers), lambda _: 600.0):
            found = (
                [f"traces {job.start} to {job.stop - 1}: {answer.why}"]
                if isinstance(answer, isolate.Died)
                else answer[0]
            )
            happened.update(Counter() if isinstance(answer, isolate.Died) else answer[1])
            faults += found
            bar.step(f"{happened['traces']} traces", bool(found))
    doc = {
        "environment": environment(),
        "first": args.first,
        "traces": args.traces,
        "differing": len(faults),
        "faults": faults[:100],
    }
    doc |= {"happened": dict(happened), "seconds": round(time.perf_counter() - begin, 1)}
    if args.json:
        document.write(doc, args.json)
    lines = [
        *faults[:20],
        ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in sorted(happened.items())),
    ]
    _say(
        args,
        [
            *lines,
            f"{len(faults)} requests differ from their lone run"
            if faults
            else "every request has the bits of its lone run",
        ],
    )
    return 1 if faults else 0


def interrupts(args: Namespace) -> int:
    """`lab interrupts`."""
    from lockstep.lab import interrupt
    from lockstep.lab.environment import environment

    begin, account, doc = (
        time.perf_counter(),
        interrupt.Account(),
        {"environment": environment(), "seed": args.seed},
    )
    torch.set_num_threads(1)
    with Progress(args.count, "lab interrupts") as bar:

        def note(trial: interrupt.Trial) -> None:
            account.note(trial)
            for _ in range(min(trial.struck, args.count - bar.done)):
                bar.step(trial.model, bool(trial.faults))

        account.engines = interrupt.run(args.count, args.seed, note)
    sweeps = (
        [(tiny, second) for tiny in interrupt.MODELS for second in (False, True)]
        if args.aimed
        else []
    )
    with Progress(len(sweeps), f"lab interrupts at {args.aimed}") as bar:
        for tiny, second in sweeps:
            for trial in interrupt.sweep(tiny, args.aimed == "bytecodes", second, args.seed):
                account.note(trial)
            bar.step(tiny.name)
    doc |= {**account.as_json(), "seconds": round(time.perf_counter() - begin, 1)}
    if args.json:
        document.write(doc, args.json)
    _say(args, account.lines())
    return 1 if account.faults else 0


def cases() -> list[dict[str, Any]]:
    """Every case file, nothing measured."""
    return [kill.case(reverts.load(name)) for name in reverts.names()]


def kills(args: Namespace) -> int:
    """`lab reverts`."""
    names = (
        picked("a revert is a file in lab/reverts", args.name, reverts.names()) or reverts.names()
    )
    if not names:
        raise RuleError(
            "lab/reverts holds one file per revert",
            "an empty folder",
            "Without one the lab proves nothing",
        )
    if args.list:
        for name in names:
            revert = reverts.load(name)
            print(
                f"{name}: {revert.title}\n    {revert.target}; "
                f"{', '.join(revert.cells) or 'equivalent'}"
            )
        return 0
    picked_backends([args.backend])
    earlier = document.read(args.source) if args.source else None
    total = len(kill.jobs([reverts.load(name) for name in names], args.backend))
    with Progress(total, "lab reverts") as bar:
        campaign = kill.run(names, args.backend, args.workers, bar.step)
    ran = earlier["cells"] if earlier else [r.as_json() for r in campaign.baseline.values()]
    doc = document.document(
        ran, earlier["quick"] if earlier else True, campaign.seconds, kills=campaign.as_json()
    )
    _write(args, doc)
    _say(args, kill_lines(campaign, args.backend))
    _open(args)
    return 1 if campaign.red() or campaign.survivors() else 0


def pages(args: Namespace) -> int:
    """`lab matrix`."""
    backends = picked_backends(args.backend)
    folder = Path(args.docs)
    if not folder.is_dir():
        raise RuleError(
            "the pages lie in docs/ of the repository",
            f"{args.docs}: no such folder",
            "Run this at its root, or pass --docs",
        )
    for name in () if args.check else matrix.FILES:
        outfile.check("--docs", str(folder / name))
    if args.source:
        verdicts = matrix.ran(document.read(args.source), backends)
    elif args.check:
        verdicts = matrix.promised(backends)
    else:
        args.quick, args.no_checks, args.html = False, False, None
        doc = judged(cells.cells(backends), args, time.perf_counter())
        print("\n".join(run_lines(doc)))
        verdicts = matrix.ran(doc, backends)
    wanted = matrix.pages(verdicts)
    if args.check:
        wrong = matrix.stale(folder, wanted)
        print(
            "\n".join(
                [*wrong, "run `lockstep lab matrix`"]
                if wrong
                else [f"{', '.join(wanted)}: up to date"]
            )
        )
        return 1 if wrong else 0
    for name, text in wanted.items():
        outfile.write(str(folder / name), text)
        print(f"wrote {folder / name}")
    return 1 if any(verdict == "failed" for verdict, _ in verdicts.values()) else 0


def cell_story(args: Namespace) -> int:
    """`lab show`."""
    cell = cells.Cell.parse(args.cell)
    steps = show.story(cell, not args.no_checks)
    if args.step is not None and not 0 <= args.step < len(steps):
        raise RuleError(
            f"{cell} has the steps 0 to {len(steps) - 1}",
            f"--step {args.step}",
            "Pick one of these",
        )
    if args.json:
        kept = [s for s in steps if args.step in (None, s["step"])]
        document.write({"cell": str(cell), "checks": not args.no_checks, "steps": kept}, args.json)
    if args.json != "-":
        print(show.text(cell, steps, args.step))
    return 0


def chosen_cells(args: Namespace) -> list[cells.Cell]:
    """The cells that the options name."""
    backends = picked_backends(args.backend)
    named = picked(
        "a recipe is one of the lab's",
        args.recipe,
        [r.name for sheet in SHEETS for r in sheet.recipes],
    )
    features = picked(
        "a feature is one of the lab's",
        args.feature,
        [f.name for sheet in SHEETS for f in sheet.features],
    )
    found = [
        c
        for c in cells.cells(backends)
        if (not named or c.recipe in named) and (not features or c.feature in features)
    ]
    if args.quick and not named and not features:
        found = [c for c in found if quick(c)]
    if not found:
        raise RuleError(
            "the recipe makes sense for the feature",
            f"{args.recipe} and {args.feature}",
            "See `lockstep lab run --list`",
        )
    return found


def quick(cell: cells.Cell) -> bool:
    """Whether a quick run has the cell: all recipes on a plain feature, a handful on others; every
    engine recipe on one model."""
    if cell.sheet is ENGINE:
        return cell.feature == QUICK_MODEL or cell.recipe in QUICK_SAMPLER
    return cell.feature == "dense" or (
        cell.feature in QUICK_FEATURES and cell.recipe in QUICK_RECIPES
    )


def picked_backends(given: list[str] | None) -> list[str]:
    """The backends that --backend names, or ours, each of which can be loaded."""
    chosen = picked("a backend is installed", given, select.names()) or [
        b for b in BACKENDS if b in select.names()
    ]
    for name in chosen:
        select.load(name)  # here, where its reason is one line; not in every worker process
    return chosen


def picked(rule: str, given: list[str] | None, allowed: Sequence[str]) -> list[str]:
    """Values of a repeatable option, commas split, each one checked."""
    values = list(dict.fromkeys(part for text in given or [] for part in text.split(",") if part))
    for value in values:
        if value not in allowed:
            close = get_close_matches(value, allowed, 1)
            raise RuleError(
                rule,
                repr(value),
                f"Did you mean {close[0]}?" if close else f"There are {', '.join(allowed)}",
            )
    return values


def run_lines(doc: document.Document) -> list[str]:
    """The account of a run: counts by backend, every failure with its command, the worst error."""
    total = doc["summary"]
    rows = [
        ["backend", "passed", "refused", "known", "failed", "worst error", "of its tolerance", "in"]
    ]
    for name, b in total["backends"].items():
        worst = b["worst"]
        tail = ["-", "-", "-"]
        if worst:
            tail = [
                f"{_number(worst['out_error'])}",
                f"{_number(worst['tolerance_used'])}",
                worst["cell"],
            ]
        rows.append([name, *(str(b[v]) for v in ("passed", "refused", "known", "failed")), *tail])
    lines = aligned(rows, right=range(1, 7))
    for cell in (c for c in doc["cells"] if c["verdict"] == "failed"):
        others = [f["name"] for f in cell["findings"] if not f["held"]][1:]
        also = f" (also {', '.join(dict.fromkeys(others))})" if others else ""
        lines += ["", f"FAILED {cell['cell']}: {cell['reason']}{also}", f"  {reproduce(doc, cell)}"]
    verdict = f"{total['failed']} of them FAILED" if total["failed"] else "all green"
    return [*lines, "", f"{total['cells']} cells in {total['seconds']:.1f} s: {verdict}"]


def reproduce(doc: document.Document, cell: dict[str, Any]) -> str:
    """The command that shows this cell again."""
    before = f"{reverts.VARIABLE}={doc['revert']} " if doc["revert"] else ""
    return f"{before}{cell['command']}{'' if doc.get('checks', True) else ' --no-checks'}"


def kill_lines(campaign: kill.Campaign, backend: str) -> list[str]:
    """The kill table, and whatever is wrong with it."""
    red = campaign.red()
    first = (
        f"without a revert: all {len(campaign.baseline)} cells are green"
        if not red
        else f"without a revert: RED in {', '.join(red)}"
    )
    counted = [k for k in campaign.kills if not k.revert.equivalent]
    rows = [["", "revert", "target", "checks on", "checks off"]]
    for k in counted:
        on = " / ".join(["guard: " + rule for rule in k.rules()]) or ", ".join(k.by(True)) or "-"
        mark = "✓" if k.killed else "✗"
        rows.append(
            [
                mark,
                k.revert.name,
                k.revert.target.removeprefix("lockstep."),
                _short(on, 64),
                _short(", ".join(k.by(False)) or "-", 56),
            ]
        )
    lines = [first, "", *(aligned(rows) if counted else [])]
    for k in campaign.survivors():
        for t in (t for t in k.trials if not t.killed):
            what = (
                "stays green"
                if t.verdict == "passed"
                else f"{t.verdict}, but not by a property "
                f"({'; '.join(f.detail for f in t.broken)[:160]})"
            )
            lines += [
                "",
                f"SURVIVED {k.revert.name}: {t.cell} {what} with checks "
                f"{'on' if t.checks else 'off'}",
                f"  {_again(k, t, backend)}",
            ]
    for k in (k for k in campaign.kills if k.revert.equivalent):
        lines += [
            "",
            f"equivalent, not counted: {k.revert.name}",
            *textwrap.wrap(k.revert.equivalent, 110, initial_indent="  ", subsequent_indent="  "),
        ]
    dead = sum(k.killed for k in counted)
    return [
        *lines,
        "",
        f"{len(counted)} reverts in {campaign.seconds:.1f} s: {dead} killed, {len(counted) - dead} "
        "survived",
    ]


def _again(k: kill.Kill, t: kill.Trial, backend: str) -> str:
    recipe, feature = t.cell.split("/")
    flag = "" if t.checks else " --no-checks"
    return (
        f"{reverts.VARIABLE}={k.revert.name} lockstep lab run --backend {backend} --recipe "
        f"{recipe} --feature {feature} --quick{flag}"
    )


def aligned(rows: list[list[str]], right: Sequence[int] = ()) -> list[str]:
    """Columns as wide as their widest entry, two blanks between them."""
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            x.rjust(w) if i in right else x.ljust(w)
            for i, (x, w) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in rows
    ]


def _list_cells(todo: Sequence[cells.Cell]) -> int:
    for cell in todo:
        recipe, feature = cell.pair()
        print(f"{cell!s:<40} {recipe.says}; {feature.says}")
    return 0


def _write(args: Namespace, doc: document.Document) -> None:
    if args.json:
        document.write(doc, args.json)
    if args.html:
        outfile.write(args.html, report.page(doc))


def _say(args: Namespace, lines: list[str]) -> None:
    print("\n".join(lines), file=sys.stderr if args.json == "-" else sys.stdout)


def _open(args: Namespace) -> None:
    if args.html:
        _say(args, [f"open {args.html}"])


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.2g}"


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
