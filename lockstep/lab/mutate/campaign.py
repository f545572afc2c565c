"""`lockstep lab mutate`: draws mutants, tries them, prints survivors, writes the document.

A mutant is killed by a unit that is green without it and, with it, red or far beyond its time.
Survivors together meet the remaining units in one tree; for a unit that is red there, they are
halved until one mutant is left that turns it red alone. A person may have judged a survivor
(`--verdicts`): `equivalent` (no run can differ), `neutral` (runs differ, but no answer, count or
error can), or `open`. The work folder keeps what can be resumed: one journal per state of the
sources, and the coverage of units. A test file, or the cells of one recipe, is measured in one
process under coverage, and again when a file that it reached has changed. Coverage sees neither
code that Numba compiled nor processes that a test starts: a mutant that no unit seems to reach
meets every unit as a survivor.
"""

import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from textwrap import indent
from typing import Any

from lockstep.lab import cells, commands, document
from lockstep.lab.mutate import draw, pool
from lockstep.lab.mutate.draw import Mutant
from lockstep.lab.mutate.pool import OWN, Crew, Job, digest
from lockstep.progress import Progress
from lockstep.types import RuleError

MUTANT_S = 60.0  # limit for a mutant alone with the units that reach it
BATCH = 32  # units that share a process when survivors meet them
# a mutant of these recompiles the kernels, and may take this much longer before it hangs
COMPILED = ("lockstep/plan/address.py", "lockstep/order.py", "lockstep/kernels/")
COMPILE_S = 300.0
ALL = ""  # journal entry instead of a unit: all units that reach the mutant have met it
MODULES = ("plan", "kv", "attention", "sample", "sched", "llm", "run")
WARM_CELLS = ("decode/dense", "engine-batch/llama", "engine-encoder/bart", "sample/llama")
SHOWN = ("id", "module", "file", "line", "operator", "diff")  # a mutant's fields in the document
TOOLS = ("cosmic-ray", "coverage", "pytest", "hypothesis")
JUDGEMENTS = ("equivalent", "neutral", "open")
COUNTED = ("killed", *JUDGEMENTS)
CELLS = "tests/lab_cells.py"  # cells of the lab as tests
UNSEEN = ("tests/test_interrupt.py",)  # interrupts itself, even inside coverage: not measured

Group = Sequence[Mutant]
Verdicts = dict[str, dict[str, str]]  # id → judgement and reason


@dataclass(frozen=True)
class Unit:
    """A test or a cell, as it ran without a mutant."""

    name: str
    seconds: float
    outcome: str  # passed, failed, skipped
    lines: Mapping[str, Sequence[int]]  # file → lines
    detail: str = ""


def groups(root: Path) -> dict[str, list[str]]:
    """Returns units that are measured together, by name: every test file; every recipe, with all
    cells of `cpu` and the quick ones of `reference`."""
    names = [f"tests/{path.name}" for path in sorted((root / "tests").glob("test_*.py"))]
    found = {name: [name] for name in names if name not in OWN}
    for cell in cells.cells(["cpu", "reference"]):
        if cell.backend == "cpu" or commands.quick(cell):
            found.setdefault(f"cells {cell.recipe}", []).append(f"{CELLS}::test_cell[{cell}]")
    return found


def measure(crew: Crew, group: Sequence[str]) -> tuple[list[Unit], set[str]]:
    """Runs a group under coverage. Returns its units and every file reached, imports included."""
    file = pool.file_of(group[0])
    heard = crew.run(Job(group, stop=False, measure=file not in UNSEEN))
    if heard.end:
        raise RuleError("every unit finishes without a mutant", heard.end, f"Fix {file} first")
    units = [Unit(**told, lines=heard.reached.get(n, {})) for n, told in heard.units.items()]
    return units, {file, *(file for lines in heard.reached.values() for file in lines)}


@dataclass
class Reach:
    """Which units reach which lines: units by name, kept in a folder, one file per group."""

    units: dict[str, Unit] = field(default_factory=dict)
    folder: Path = Path()
    sources: Mapping[str, str] = field(default_factory=dict)  # current digests
    stale: bool = False  # remeasure only if its own file changed; forget lines of others

    def green(self) -> list[Unit]:
        return [u for u in self.units.values() if u.outcome == "passed"]

    def of(self, file: str, line: int) -> list[Unit]:
        """Returns the green units that reach the line, else those that reach the file (lines run at
        import belong to no unit). Fast and specific units (that reach few lines) are first."""
        green = self.green()
        found = [u for u in green if line in u.lines.get(file, ())]
        compiled = pool.TABLE["compiled_for"].items()
        either = {file, next((caller for here, caller in compiled if file.startswith(here)), file)}
        found = found or [u for u in green if either & set(u.lines)]
        lens = {u.name: sum(map(len, u.lines.values())) for u in found}
        return sorted(found, key=lambda u: (u.seconds + 0.05) * (lens[u.name] + 20))

    def load(self, asked: Mapping[str, Sequence[str]], crew: Crew) -> None:
        """Loads the kept groups and measures the others."""

        def units_of(group: Sequence[str]) -> list[Unit]:
            units = self.kept(group)
            if units is None:
                units, reached = measure(crew, group)
                self.save(group, units, reached)
            return units

        with Progress(len(asked), "lab mutate: coverage") as bar:
            for name, units in zip(asked, crew.map(units_of, asked.values()), strict=True):
                self.units.update((u.name, u) for u in units)
                bar.step(name, any(u.outcome == "failed" for u in units))

    def kept(self, group: Sequence[str]) -> list[Unit] | None:
        """Returns a group's units as measured; None if it has to be measured (again)."""
        path = self._path(group)
        if not path.is_file():
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
        changed = {file for file, was in value["sources"].items() if self.sources.get(file) != was}
        if changed and (not self.stale or pool.file_of(group[0]) in changed):
            return None
        for row in value["units"]:
            row["lines"] |= {file: [] for file in changed & set(row["lines"])}
        return [Unit(**row) for row in value["units"]]

    def save(self, group: Sequence[str], units: list[Unit], reached: Iterable[str]) -> None:
        sources = {file: self.sources[file] for file in reached if file in self.sources}
        value = {"sources": sources, "units": list(map(vars, units))}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path(group).write_text(json.dumps(value), encoding="utf-8")

    def _path(self, group: Sequence[str]) -> Path:
        return self.folder / f"{digest(' '.join(group).encode())}.json"


class Journal:
    """All outcomes so far, so that an interrupted run can resume: by the ids of the mutants that
    shared a tree, then by unit; "" if it was green, else the error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: dict[str, dict[str, str]] = {}
        if path.is_file():
            for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
                self.said.setdefault(entry["ids"], {})[entry["unit"]] = entry["said"]

    def note(self, ids: str, said: Mapping[str, str]) -> None:
        """Records the units' outcomes with these mutants."""
        self.said.setdefault(ids, {}).update(said)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            for unit, what in said.items():
                print(json.dumps({"ids": ids, "unit": unit, "said": what}), file=stream)

    def killer(self, mutant: str) -> str:
        """Returns a unit that is red with this mutant alone and not without it; "" if none."""
        anyway = self.said.get("", {})
        met = self.said.get(mutant, {}).items()
        return next((unit for unit, said in met if said and not anyway.get(unit)), "")

    def green(self, mutant: str) -> set[str]:
        """Returns the units that were green with this mutant, alone or among others."""
        groups = (met for ids, met in self.said.items() if mutant in ids.split())
        return {unit for met in groups for unit, said in met.items() if not said}


@dataclass
class Campaign:
    root: Path
    mutants: Sequence[Mutant]
    reach: Reach
    journal: Journal
    crew: Crew

    def __post_init__(self) -> None:
        self.times = {u.name: u.seconds for u in self.reach.units.values()}

    def todo(self) -> list[Mutant]:
        """Returns the mutants that have not yet met the units that reach them."""
        return [m for m in self.mutants if ALL not in self.journal.said.get(m.id, {})]

    def survivors(self) -> list[Mutant]:
        return [m for m in self.mutants if not self.journal.killer(m.id)]

    def alone(self) -> None:
        todo = self.todo()
        with Progress(len(todo), "lab mutate: each alone") as bar:
            for mutant, said in zip(todo, self.crew.map(self._try, todo), strict=True):
                self.journal.note(mutant.id, {**said, ALL: ""})
                bar.step(f"{mutant.file}:{mutant.line}", not self.journal.killer(mutant.id))

    def together(self) -> None:
        """Runs the survivors together against every unit that they have not met."""
        group = self.survivors()
        red = self._meet(group, self.rest(), "survivors together")
        while red and group:
            unit = min(red, key=lambda u: self.times.get(u, 0.0))
            mutant = self._culprit(group, unit)
            if mutant is None:  # red by several mutants together, and by none alone
                red.remove(unit)
                continue
            group = [m for m in group if m.id != mutant.id]
            red = self._meet(group, red)

    def confirm(self) -> None:
        """Runs every killer once more without a mutant: a unit that is red there killed nothing."""
        killers = {self.journal.killer(m.id) for m in self.mutants}
        known = sorted(killers & set(self.reach.units))
        self._meet([], known, "killers without a mutant", batch=1)

    def rest(self) -> list[str]:
        """Returns the units that were not green with every survivor: `together` runs them."""
        met = [self.journal.green(m.id) for m in self.survivors()]
        return [u.name for u in self.reach.green() if not all(u.name in green for green in met)]

    def _try(self, mutant: Mutant) -> dict[str, str]:
        units = [u.name for u in self.reach.of(mutant.file, mutant.line)]
        return self._ask(units, [mutant], stop=True, limit_s=MUTANT_S) if units else {}

    def _ask(self, units: Sequence[str], group: Group, **how: Any) -> dict[str, str]:
        """Returns each unit's error with mutants that share a tree, "" if it is green or gone."""
        changes = draw.combined(group, self.root)
        hang_s = COMPILE_S if any(file.startswith(COMPILED) for file in changes) else pool.HANG_S
        job = Job(units=units, changes=changes, seconds=self.times, hang_s=hang_s, **how)
        heard = self.crew.run(job).units.items()
        return {u: told["detail"] if told["outcome"] == "failed" else "" for u, told in heard}

    def _meet(
        self, group: Group, units: Sequence[str], label: str = "halving", batch: int = BATCH
    ) -> list[str]:
        """Returns the units that are red with a group. Outcomes in the journal are reused."""
        ids = " ".join(sorted(m.id for m in group))
        known = self.journal.said.setdefault(ids, {})
        new = [u for u in units if u not in known]
        asked = [new[i : i + batch] for i in range(0, len(new), batch)]
        with Progress(len(new), f"lab mutate: {label}") as bar:
            for said in self.crew.map(lambda names: self._batch(names, group), asked):
                self.journal.note(ids, said)
                for unit, what in said.items():
                    bar.step(unit, bool(what))
        return [u for u in units if known[u]]

    def _batch(self, units: Sequence[str], group: Group) -> dict[str, str]:
        """Runs every unit once; after one kills the process, the others run in a new process."""
        said: dict[str, str] = {}
        while left := [name for name in units if name not in said]:
            heard = self._ask(left, group, stop=False)
            said |= heard or dict.fromkeys(left, "the process ended before its first test")
        return said

    def _culprit(self, group: Group, unit: str) -> Mutant | None:
        """Returns the mutant that turns a unit red alone; the whole group turns it red."""
        if len(group) == 1:
            return group[0]
        middle = len(group) // 2
        halves = (group[:middle], group[middle:])
        red = next((half for half in halves if self._meet(half, [unit])), None)
        return self._culprit(red, unit) if red else None


def run(args: Namespace) -> int:
    """Returns 1 while a survivor is open."""
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
    doc = document.head()
    doc["environment"] |= {name: version(name) for name in TOOLS}
    doc |= {key: vars(args)[key] for key in ("seed", "count", "skip", "alone")}
    doc |= {"seconds": round(time.perf_counter() - begin, 1), "summary": count(rows)}
    doc["mutants"] = rows
    document.publish(args, doc, document.text("mutate.txt", doc=doc))
    return int(doc["summary"]["all"]["open"] > 0)


def chosen(args: Namespace, root: Path) -> list[Mutant]:
    modules = list(dict.fromkeys(args.module)) or list(MODULES)
    mutants = draw.draw(modules, root, args.seed, args.count, args.skip or ())
    if args.mutant is None:
        return mutants
    found = [m for m in mutants if m.id in args.mutant]
    if missing := set(args.mutant) - {m.id for m in found}:
        remedy = "See --list with the same modules, --seed and --count"
        raise RuleError("--mutant is an id of this draw", ", ".join(sorted(missing)), remedy)
    return found


def played(args: Namespace, root: Path, mutants: list[Mutant]) -> Campaign:
    work, sources = Path(args.work).resolve(), pool.digests(root)
    crew = Crew(root, work, args.workers, pool.TABLE["warm"])
    state = digest(json.dumps(sources, sort_keys=True).encode())
    journal = Journal(work / f"journal-{state}.jsonl")
    for m in mutants if args.mutant else ():  # mutants requested by id are tried again
        journal.said.pop(m.id, None)
    words = args.units or [""]
    asked = {name: g for name, g in groups(root).items() if any(word in name for word in words)}
    found = Reach(folder=work / "reach", sources=sources, stale=args.stale)
    found.load(asked, crew)
    # every tree compiles its kernels before mutants are timed
    warm = [f"{CELLS}::test_cell[cpu/{cell}]" for cell in WARM_CELLS]
    list(crew.map(crew.run, [Job(units=warm, stop=False)] * crew.count))
    campaign = Campaign(crew.template, mutants, found, journal, crew)
    campaign.alone()
    if not args.alone:
        campaign.together()
    campaign.confirm()
    return campaign


def read_verdicts(path: Path) -> Verdicts:
    """Returns the file's verdicts; empty if there is no file."""
    if not path.is_file():
        return {}
    found: Verdicts = json.loads(path.read_text(encoding="utf-8"))
    for key, verdict in found.items():
        known = isinstance(verdict, dict) and verdict.get("judgement") in JUDGEMENTS
        if not known or not verdict.get("reason", "").strip():
            rule = f"a verdict has a reason, and a judgement: {', '.join(JUDGEMENTS)}"
            raise RuleError(rule, f"{path}: {key}: {verdict}", "Correct the file")
    return found


def row(mutant: Mutant, journal: Journal, known: Verdicts) -> dict[str, Any]:
    verdict = known.get(mutant.id, {"judgement": "open", "reason": ""})
    found = {"verdict": verdict["judgement"], "reason": verdict["reason"]}
    if killer := journal.killer(mutant.id):
        detail = journal.said[mutant.id][killer]
        found = {"verdict": "killed", "killer": killer, "detail": detail}
    return {**{key: getattr(mutant, key) for key in SHOWN}, **found}


def count(mutants: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts verdicts per module, with the share of kills among killed and open mutants."""
    out: dict[str, dict[str, Any]] = {}
    for name in [*dict.fromkeys(m["module"] for m in mutants), "all"]:
        found = Counter(m["verdict"] for m in mutants if name in (m["module"], "all"))
        counted = found["killed"] + found["open"]
        share = round(found["killed"] / counted, 4) if counted else None
        out[name] = {**{verdict: found[verdict] for verdict in COUNTED}, "share": share}
    return out
