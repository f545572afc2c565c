"""Which test and which cell reaches which line, and how long each takes: measured once and kept.

A group is a test file, or the cells of one recipe; it is measured in one process under coverage,
one context per unit. It is kept with the digests of every file that it reached, and stands as long
as these stand. Code that Numba compiled, and what a test starts in a process of its own, is
invisible here: a mutant nobody seems to reach still meets everything together with the other
survivors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

from lockstep.lab.mutate.pool import Crew
from lockstep.lab.mutate.tree import OWN, digest
from lockstep.lab.mutate.trial import CELL, Job
from lockstep.types import RuleError

UNSEEN = ("tests/test_interrupt.py",)  # interrupts itself, also inside coverage: runs without
# what Numba compiles is not seen; whoever reaches these files runs it
COMPILED_FOR = {
    "lockstep/plan/rules.py": "lockstep/plan/check.py",
    "lockstep/kernels/cpu/gemm.py": "lockstep/nn/linear.py",
    "lockstep/kernels/cpu/rows.py": "lockstep/nn/norm.py",
    "lockstep/sample/formulas.py": "lockstep/sample/sampler.py",
    "lockstep/kernels/cpu/sample.py": "lockstep/sample/sampler.py",
    "lockstep/kernels/cpu/sample_rows.py": "lockstep/sample/sampler.py",
    "lockstep/kernels/cpu/": "lockstep/attention/cpu.py",
}


OnGroup = Callable[[str, bool], None]


@dataclass(frozen=True)
class Unit:
    """A test or a cell as it was without a mutant."""

    name: str
    seconds: float
    outcome: str  # passed, failed, skipped
    lines: Mapping[str, frozenset[int]]  # file → lines
    detail: str = ""

    @property
    def cost(self) -> float:
        """Fast units come first, and specific ones: those that reach few lines."""
        return (self.seconds + 0.05) * (sum(map(len, self.lines.values())) + 20)


@dataclass(frozen=True)
class Group:
    """Units that are measured together."""

    name: str
    files: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()


@dataclass
class Reach:
    """Units by name."""

    units: dict[str, Unit] = field(default_factory=dict)

    def of(self, file: str, lines: Iterable[int]) -> list[Unit]:
        """The green units that reach one of the lines, or else the file; the best first."""
        green = [u for u in self.units.values() if u.outcome == "passed"]
        wanted = set(lines)
        found = [u for u in green if wanted & u.lines.get(file, frozenset())]
        shown = (there for here, there in COMPILED_FOR.items() if file.startswith(here))
        files = {file, next(shown, file)}
        found = found or [u for u in green if files & set(u.lines)]
        return sorted(found, key=lambda unit: unit.cost)

    def rest(self, tried: Iterable[str]) -> list[Unit]:
        """The green units that were not tried, file by file."""
        out = set(tried)
        return [u for u in self.units.values() if u.outcome == "passed" and u.name not in out]


def groups(root: Path) -> list[Group]:
    """Every test file; every recipe with all cells of `cpu` and the quick ones of `reference`."""
    from lockstep.lab import cells, commands

    names = [f"tests/{path.name}" for path in sorted((root / "tests").glob("test_*.py"))]
    tests = [Group(name, files=(name,)) for name in names if name not in OWN]
    recipes: dict[str, list[str]] = {}
    for cell in cells.cells(["cpu", "reference"]):
        if cell.backend == "cpu" or commands.quick(cell):
            recipes.setdefault(cell.recipe, []).append(CELL + str(cell))
    return [
        *tests,
        *(Group(CELL + recipe, cells=tuple(names)) for recipe, names in recipes.items()),
    ]


def measure(crew: Crew, group: Group) -> tuple[list[Unit], set[str]]:
    """Runs a group under coverage. Its units, and every file that it reached, imports included."""
    seen = group.name not in UNSEEN
    job = Job(units=group.cells, files=group.files, stop=False, measure=seen, keep=True)
    heard = crew.run(job)
    if heard.end != "done":
        raise RuleError("every unit ends without a mutant", heard.end, f"Mend {group.name} first")
    lines = {unit: frozen(found) for unit, found in heard.reached.items()}
    units = [Unit(**told, lines=lines.get(name, {})) for name, told in heard.units.items()]
    return units, {*group.files, *(file for found in lines.values() for file in found)}


def frozen(lines: Mapping[str, Iterable[int]]) -> dict[str, frozenset[int]]:
    """File → lines as a unit has them."""
    return {file: frozenset(found) for file, found in lines.items()}


@dataclass(frozen=True)
class Store:
    """What was measured, in a folder: one file per group, and the texts that line numbers belong
    to."""

    folder: Path
    root: Path  # the repository as it is now
    sources: Mapping[str, str]  # its digests
    stale: bool = False  # a group stands though what it reached has changed: lines are carried over

    def load(self, asked: Iterable[Group], crew: Crew, on_group: OnGroup) -> Reach:
        """The map, from what is kept and what has to be measured now."""
        reach = Reach()
        for name, units in crew.map(lambda group: (group.name, self.units(group, crew)), asked):
            reach.units.update((u.name, u) for u in units)
            on_group(name, any(u.outcome == "failed" for u in units))
        return reach

    def units(self, group: Group, crew: Crew) -> list[Unit]:
        """The units of a group, measured if they are not kept; with a stale map, cells that are new
        besides."""
        units = self.kept(group)
        if units is None:
            units, files = measure(crew, group)
            self.save(group, units, files)
        have = {u.name for u in units}
        new = tuple(cell for cell in group.cells if cell not in have)
        return [*units, *(self.units(Group(f"{group.name}+", cells=new), crew) if new else ())]

    def kept(self, group: Group) -> list[Unit] | None:
        """A group as it was measured; None if it has to be measured (again)."""
        path = self._path(group)
        if not path.is_file():
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
        changed = {f: was for f, was in value["sources"].items() if self.sources.get(f) != was}
        fits = value["group"] == json.loads(json.dumps(asdict(group)))
        if changed.keys() & set(group.files) or (not self.stale and (changed or not fits)):
            return None
        moved = {file: self._moved(file, was) for file, was in changed.items()}
        wanted = set(group.cells)
        rows = [row for row in value["units"] if group.files or row["name"] in wanted]
        return [Unit(**{**row, "lines": carried(row["lines"], moved)}) for row in rows]

    def save(self, group: Group, units: list[Unit], files: Iterable[str]) -> None:
        """Writes a group for `kept`, and the texts of the files that it reached."""
        reached = {f: self.sources[f] for f in sorted(files) if f in self.sources}
        texts = self.folder / "texts"
        texts.mkdir(parents=True, exist_ok=True)
        for file, digested in reached.items():
            if not (texts / digested).exists():
                (texts / digested).write_bytes((self.root / file).read_bytes())
        rows = [
            {**vars(u), "lines": {f: sorted(found) for f, found in u.lines.items()}} for u in units
        ]
        value = {"group": asdict(group), "sources": reached, "units": rows}
        self._path(group).write_text(json.dumps(value), encoding="utf-8")

    def _path(self, group: Group) -> Path:
        return self.folder / f"{digest(group.name.encode())}.json"

    def _moved(self, file: str, was: str) -> dict[int, int]:
        """Line of the text that was measured → line of the text as it is now."""
        before, now = self.folder / "texts" / was, self.root / file
        if not before.is_file() or not now.is_file():
            return {}
        old, new = (path.read_text(encoding="utf-8").splitlines() for path in (before, now))
        blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        return {a + i + 1: b + i + 1 for a, b, size in blocks for i in range(size)}


def carried(
    lines: Mapping[str, list[int]], moved: Mapping[str, Mapping[int, int]]
) -> dict[str, frozenset[int]]:
    """Lines of a unit where they stand now; one that has changed is lost, its file is not."""
    found = frozen(lines)
    for file in moved.keys() & found.keys():
        found[file] = frozenset(moved[file][line] for line in found[file] if line in moved[file])
    return found
