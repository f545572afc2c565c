"""`lockstep lab mutate`: draws mutants, tries them, prints those that live, writes the document.

Takes parsed arguments and returns an exit code: 1 while a survivor is open. `cli` calls it.
Everything that can be taken up again lies in the work folder: the map of who reaches what, the
trees, and one journal per state of the sources.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lockstep.lab import document
from lockstep.lab.mutate import draw, reach, tree, verdicts
from lockstep.lab.mutate.campaign import Campaign, Fate, Journal
from lockstep.lab.mutate.draw import Mutant
from lockstep.lab.mutate.pool import Crew
from lockstep.lab.mutate.trial import CELL, Job
from lockstep.progress import Progress
from lockstep.types import RuleError

MODULES = ("plan", "kv", "attention", "sample", "sched", "llm", "run")
WARM_RECIPES = ("decode", "engine-batch", "engine-encoder", "sample")  # run every kernel
SHOWN = ("id", "module", "file", "line", "operator", "diff")  # of a mutant, in the document
TOOLS = ("cosmic-ray", "coverage", "pytest", "hypothesis")


def run(args: Namespace) -> int:
    """`lab mutate`."""
    begin = time.perf_counter()
    root = tree.repository()
    known = verdicts.read(root / args.verdicts)
    mutants = chosen(args, root)
    if args.list:
        for m in mutants:
            where = f"{m.id} {m.file}:{m.line} {m.operator}"
            print("\n".join([where, *shown(m.diff), ""]))
        return 0
    campaign = played(args, root, mutants)
    rows = [row(m, campaign.journal.fates[m.id], known) for m in mutants]
    doc = described(args, rows, time.perf_counter() - begin)
    document.publish(args, doc, lines(doc))
    return 1 if doc["summary"]["all"]["open"] else 0


def chosen(args: Namespace, root: Path) -> list[Mutant]:
    """The mutants that the options name."""
    modules = list(dict.fromkeys(args.module)) or list(MODULES)
    skip = args.skip or ()
    mutants = [m for name in modules for m in draw.draw(name, root, args.seed, args.count, skip)]
    if args.mutant is None:
        return mutants
    found = [m for m in mutants if m.id in args.mutant]
    if missing := set(args.mutant) - {m.id for m in found}:
        remedy = "See --list with the same modules, --seed and --count"
        raise RuleError("a mutant is one of this draw", ", ".join(sorted(missing)), remedy)
    return found


def played(args: Namespace, root: Path, mutants: list[Mutant]) -> Campaign:
    """Map, first meeting, second meeting."""
    work = Path(args.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    trees = tree.Trees(root, work)
    trees.renew()
    sources = tree.digests(root)
    tests = {name: mark for name, mark in sources.items() if name.startswith("tests/")}
    engine = {name: mark for name, mark in sources.items() if name not in tests}
    state = tree.digest(json.dumps(engine, sort_keys=True).encode())
    journal = Journal(work / f"journal-{state}.jsonl")
    if args.again:
        for m in mutants:
            journal.fates.pop(m.id, None)
    crew = Crew(trees, args.workers)
    found = mapped(args, sources, crew)
    warm(crew, found)
    campaign = Campaign(trees.template, mutants, found, journal, crew, earlier(work), tests)
    with Progress(len(campaign.todo()), "lab mutate: each alone") as bar:
        campaign.alone(bar.step)
    if not args.alone:
        with Progress(campaign.rest_len(), "lab mutate: survivors together") as bar:
            campaign.together(bar.step)
    killers = {fate.killer for fate in journal.fates.values()} - {""}
    with Progress(len(killers), "lab mutate: killers without a mutant") as bar:
        campaign.confirm(bar.step)
    return campaign


def mapped(args: Namespace, sources: dict[str, str], crew: Crew) -> reach.Reach:
    """Who reaches what."""
    asked = reach.groups(crew.trees.root)
    if args.units:
        asked = [g for g in asked if any(word in g.name for word in args.units)]
    store = reach.Store(crew.trees.work / "reach", crew.trees.template, sources, args.stale)
    with Progress(len(asked), "lab mutate: who reaches what") as bar:
        return store.load(asked, crew, bar.step)


def warm(crew: Crew, found: reach.Reach) -> None:
    """Lets every tree compile the kernels before a mutant's time runs."""
    cells = [name for name in found.units if name.startswith(CELL)]
    firsts = {name.split("/")[1]: name for name in reversed(cells)}
    units = [firsts[recipe] for recipe in WARM_RECIPES if recipe in firsts]
    list(crew.map(crew.run, [Job(units=units, stop=False, keep=True)] * crew.count))


def earlier(work: Path) -> dict[str, str]:
    """Mutant → who killed it in any earlier state of the sources."""
    found: dict[str, str] = {}
    for path in sorted(work.glob("journal-*.jsonl"), key=lambda p: p.stat().st_mtime):
        found |= {fate.id: fate.killer for fate in Journal(path).fates.values() if fate.killer}
    return found


def row(mutant: Mutant, fate: Fate, known: dict[str, verdicts.Verdict]) -> dict[str, Any]:
    """A mutant as the document has it."""
    verdict = known.get(mutant.id, verdicts.Verdict("open", ""))
    out = {key: getattr(mutant, key) for key in SHOWN}
    found: dict[str, Any]
    if fate.outcome == "killed":
        found = {"verdict": "killed", "killer": fate.killer, "detail": fate.detail}
    else:
        reason = verdict.reason or fate.detail
        found = {"verdict": verdict.judgement, "reason": reason, "tried": len(fate.tried)}
    return {**out, "seconds": fate.seconds, **found}


def described(args: Namespace, rows: list[dict[str, Any]], seconds: float) -> document.Document:
    """The document."""
    head = document.head()
    return {
        **head,
        "environment": {**head["environment"], **{name: version(name) for name in TOOLS}},
        "seed": args.seed,
        "count": args.count,
        "skip": args.skip or [],
        "alone": args.alone,
        "seconds": round(seconds, 1),
        "summary": verdicts.count(rows),
        "mutants": rows,
    }


def lines(doc: document.Document) -> list[str]:
    """Every open survivor with its diff, then the counts by module."""
    out: list[str] = []
    for found in (m for m in doc["mutants"] if m["verdict"] == "open"):
        reason = f": {found['reason']}" if found["reason"] else ""
        out += [
            f"OPEN {found['id']} {found['file']}:{found['line']} {found['operator']}{reason}",
            *shown(found["diff"]),
            "",
        ]
    table = [["module", "mutants", *verdicts.COUNTED, "killed of those that could be"]]
    for name, counts in doc["summary"].items():
        numbers = [counts[key] for key in verdicts.COUNTED]
        share = "-" if counts["share"] is None else f"{counts['share']:.1%}"
        table.append([name, str(sum(numbers)), *(str(n) for n in numbers), share])
    out += document.aligned(table, right=range(1, 7))
    return [
        *out,
        "",
        f"seed {doc['seed']}, {len(doc['mutants'])} mutants in {doc['seconds']:.0f} s",
    ]


def shown(diff: str) -> list[str]:
    """A diff without its file names, indented."""
    return [f"    {line}" for line in diff.splitlines()[2:]]
