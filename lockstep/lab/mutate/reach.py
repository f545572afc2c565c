"""Which test and which cell reaches which line, and how long each takes: measured once and kept.

A group, a test file or the cells of one recipe, is measured in one process under coverage and
stands as long as every file that it reached. Code that Numba compiled, and what a test starts in a
process of its own, is invisible here: a mutant nobody seems to reach meets everything as a
survivor.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.lab import cells, commands, table
from lockstep.lab.mutate.pool import OWN, Crew, Job, digest
from lockstep.progress import Progress
from lockstep.types import RuleError

CELLS = "tests/lab_cells.py"  # cells of the lab as tests
UNSEEN = ("tests/test_interrupt.py",)  # interrupts itself, also inside coverage: runs without
COMPILED_FOR = table("mutate.toml", "lockstep.lab.mutate")["compiled_for"]


@dataclass(frozen=True)
class Unit:
    """A test or a cell as it was without a mutant."""

    name: str
    seconds: float
    outcome: str  # passed, failed, skipped
    lines: Mapping[str, Sequence[int]]  # file → lines
    detail: str = ""


@dataclass(frozen=True)
class Group:
    """Tests of a file that are measured together: these, or all of them."""

    name: str
    file: str
    units: tuple[str, ...] = ()


def groups(root: Path) -> list[Group]:
    """Every test file; every recipe with all cells of `cpu` and the quick ones of `reference`."""
    names = [f"tests/{path.name}" for path in sorted((root / "tests").glob("test_*.py"))]
    recipes: dict[str, list[str]] = {}
    for cell in cells.cells(["cpu", "reference"]):
        if cell.backend == "cpu" or commands.quick(cell):
            recipes.setdefault(cell.recipe, []).append(f"{CELLS}::test_cell[{cell}]")
    tests = [Group(name, name) for name in names if name not in OWN]
    return tests + [Group(f"cells {name}", CELLS, tuple(us)) for name, us in recipes.items()]


def measure(crew: Crew, group: Group) -> tuple[list[Unit], set[str]]:
    """Runs a group under coverage. Its units, and every file that it reached, imports included."""
    seen = group.name not in UNSEEN
    heard = crew.run(Job(group.units or (group.file,), stop=False, measure=seen))
    if heard.end:
        raise RuleError("every unit ends without a mutant", heard.end, f"Mend {group.name} first")
    units = [Unit(**told, lines=heard.reached.get(n, {})) for n, told in heard.units.items()]
    return units, {group.file, *(file for lines in heard.reached.values() for file in lines)}


@dataclass
class Reach:
    """Who reaches what: units by name, kept in a folder, one file per group."""

    units: dict[str, Unit] = field(default_factory=dict)
    folder: Path = Path()
    sources: Mapping[str, str] = field(default_factory=dict)  # digests as they are now
    stale: bool = False  # a group stands as long as its own files do: lines elsewhere are forgotten

    def green(self) -> list[Unit]:
        return [u for u in self.units.values() if u.outcome == "passed"]

    def of(self, file: str, line: int) -> list[Unit]:
        """The green units that reach the line, or else the file: imports are nobody's. Fast and
        specific ones (that reach few lines) first."""
        green = self.green()
        found = [u for u in green if line in u.lines.get(file, ())]
        shown = (there for here, there in COMPILED_FOR.items() if file.startswith(here))
        either = {file, next(shown, file)}
        found = found or [u for u in green if either & set(u.lines)]
        lens = {u.name: sum(map(len, u.lines.values())) for u in found}
        return sorted(found, key=lambda u: (u.seconds + 0.05) * (lens[u.name] + 20))

    def load(self, asked: Sequence[Group], crew: Crew) -> None:
        """From what is kept and what has to be measured now."""

        def units_of(group: Group) -> list[Unit]:
            units = self.kept(group)
            if units is None:
                units, reached = measure(crew, group)
                self.save(group, units, reached)
            return units

        with Progress(len(asked), "lab mutate: who reaches what") as bar:
            for group, units in zip(asked, crew.map(units_of, asked), strict=True):
                self.units.update((u.name, u) for u in units)
                bar.step(group.name, any(u.outcome == "failed" for u in units))

    def kept(self, group: Group) -> list[Unit] | None:
        """A group as it was measured; None if it has to be measured (again)."""
        path = self._path(group)
        if not path.is_file():
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
        changed = {file for file, was in value["sources"].items() if self.sources.get(file) != was}
        stands = not changed or (self.stale and group.file not in changed)
        if not stands or value["asked"] != list(group.units):
            return None
        for row in value["units"]:
            row["lines"] |= {file: [] for file in changed & set(row["lines"])}
        return [Unit(**row) for row in value["units"]]

    def save(self, group: Group, units: list[Unit], reached: Iterable[str]) -> None:
        sources = {file: self.sources[file] for file in reached if file in self.sources}
        value = {"asked": group.units, "sources": sources, "units": list(map(vars, units))}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path(group).write_text(json.dumps(value), encoding="utf-8")

    def _path(self, group: Group) -> Path:
        return self.folder / f"{digest(group.name.encode())}.json"
