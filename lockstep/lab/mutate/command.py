"""`lockstep lab mutate`: draws mutants, tries them, prints those that live, writes the document.

A person may have found out about a survivor (`--verdicts`): it is `equivalent` (no run can differ),
`neutral` (runs differ, but no answer, count or error can), or `open`. What can be taken up again
lies in the work folder: who reaches what, the trees, and one journal per state of the sources.
"""

import json
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from textwrap import indent
from typing import Any

from lockstep.lab import document
from lockstep.lab.mutate import draw, pool, reach
from lockstep.lab.mutate.campaign import Campaign, Journal
from lockstep.lab.mutate.draw import Mutant
from lockstep.lab.mutate.pool import Crew, Job
from lockstep.types import RuleError

MODULES = ("plan", "kv", "attention", "sample", "sched", "llm", "run")
WARM_RECIPES = ("decode", "engine-batch", "engine-encoder", "sample")  # run every kernel
SHOWN = ("id", "module", "file", "line", "operator", "diff")  # of a mutant, in the document
TOOLS = ("cosmic-ray", "coverage", "pytest", "hypothesis")
JUDGEMENTS = ("equivalent", "neutral", "open")
COUNTED = ("killed", *JUDGEMENTS)

Verdicts = dict[str, dict[str, str]]  # id → judgement and reason


def run(args: Namespace) -> int:
    """1 while a survivor is open."""
    begin, root = time.perf_counter(), pool.repository()
    known = read_verdicts(root / args.verdicts)
    mutants = chosen(args, root)
    if args.list:
        for m in mutants:
            diff = "\n".join(m.diff.splitlines()[2:])  # without file names
            print(f"{m.id} {m.file}:{m.line} {m.operator}\n{indent(diff, '    ')}\n")
        return 0
    campaign = played(args, root, mutants)
    rows = [row(m, campaign.journal, known) for m in mutants]
    head = document.head()
    doc = {
        **head,
        "environment": {**head["environment"], **{name: version(name) for name in TOOLS}},
        **{key: vars(args)[key] for key in ("seed", "count", "skip", "alone")},
        "seconds": round(time.perf_counter() - begin, 1),
        "summary": count(rows),
        "mutants": rows,
    }
    document.publish(args, doc, document.text("mutate.txt", doc=doc))
    return 1 if doc["summary"]["all"]["open"] else 0


def chosen(args: Namespace, root: Path) -> list[Mutant]:
    modules = list(dict.fromkeys(args.module)) or list(MODULES)
    mutants = draw.draw(modules, root, args.seed, args.count, args.skip or ())
    if args.mutant is None:
        return mutants
    found = [m for m in mutants if m.id in args.mutant]
    if missing := set(args.mutant) - {m.id for m in found}:
        remedy = "See --list with the same modules, --seed and --count"
        raise RuleError("a mutant is one of this draw", ", ".join(sorted(missing)), remedy)
    return found


def played(args: Namespace, root: Path, mutants: list[Mutant]) -> Campaign:
    work, sources = Path(args.work).resolve(), pool.digests(root)
    crew = Crew(root, work, args.workers)
    state = pool.digest(json.dumps(sources, sort_keys=True).encode())
    journal = Journal(work / f"journal-{state}.jsonl")
    for m in mutants if args.mutant else ():  # who is asked for by name is tried again
        journal.said.pop(m.id, None)
    asked = [g for g in reach.groups(root) if any(word in g.name for word in args.units or [""])]
    found = reach.Store(work / "reach", sources, args.stale).load(asked, crew)
    warm(crew, found)
    campaign = Campaign(crew.template, mutants, found, journal, crew)
    campaign.alone()
    if not args.alone:
        campaign.together()
    campaign.confirm()
    return campaign


def warm(crew: Crew, found: reach.Reach) -> None:
    """Lets every tree compile the kernels before a mutant's time runs."""
    cells = [name for name in found.units if name.startswith(reach.CELLS)]
    firsts = {name.split("/")[2]: name for name in reversed(cells)}
    units = [firsts[recipe] for recipe in WARM_RECIPES if recipe in firsts]
    jobs = [Job(units=units, stop=False)] * (crew.count if units else 0)
    list(crew.map(crew.run, jobs))


def read_verdicts(path: Path) -> Verdicts:
    """The file's verdicts; none if there is no file."""
    if not path.is_file():
        return {}
    found: Verdicts = json.loads(path.read_text(encoding="utf-8"))
    for key, verdict in found.items():
        if not isinstance(verdict, dict) or {"judgement", "reason"} - set(verdict):
            rule = 'a verdict is "id": {"judgement": ..., "reason": ...}'
            raise RuleError(rule, f"{path}: {key}: {verdict}", "Mend the file")
        if verdict["judgement"] not in JUDGEMENTS:
            rule = f"a judgement is one of {', '.join(JUDGEMENTS)}"
            raise RuleError(rule, f"{key}: {verdict['judgement']!r}", "Choose one")
        if not verdict["reason"].strip():
            raise RuleError("a judgement has a reason", f"{key}: none", "Say why, in a sentence")
    return found


def row(mutant: Mutant, journal: Journal, known: Verdicts) -> dict[str, Any]:
    verdict = known.get(mutant.id, {"judgement": "open", "reason": ""})
    found = {"verdict": verdict["judgement"], "reason": verdict["reason"]}
    if killer := journal.killer(mutant.id):
        detail = journal.said[mutant.id][killer]
        found = {"verdict": "killed", "killer": killer, "detail": detail}
    return {**{key: getattr(mutant, key) for key in SHOWN}, **found}


def count(mutants: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Module → how many there are of each verdict, and the share of kills among killed and open."""
    out: dict[str, dict[str, Any]] = {}
    for mutant in mutants:
        for name in (mutant["module"], "all"):
            out.setdefault(name, dict.fromkeys(COUNTED, 0))[mutant["verdict"]] += 1
    out["all"] = out.pop("all", dict.fromkeys(COUNTED, 0))  # the last one
    for row in out.values():
        counted = row["killed"] + row["open"]
        row["share"] = round(row["killed"] / counted, 4) if counted else None
    return out
