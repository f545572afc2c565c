"""What becomes of mutants: each alone against what reaches it, survivors together against the rest.

A mutant is killed by a unit that is green without it and red, or far beyond its time, with it.
Whatever is found is appended to a journal at once, so a run that was ended goes on where it was.
Survivors meet the rest of the units in one tree; a unit that turns red there is put to halves of
them until one mutant is left that turns it red alone. Knows no options and prints nothing.
`command` calls it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.lab.mutate.draw import Mutant, apart, combined
from lockstep.lab.mutate.pool import Crew
from lockstep.lab.mutate.reach import Reach
from lockstep.lab.mutate.tree import digest
from lockstep.lab.mutate.trial import HANG_S, Job

MUTANT_S = 60.0  # the first meeting of a mutant with what reaches it
BATCH_S = 90.0  # units that share a process in the second
COMPILED = (
    "lockstep/plan/address.py",
    "lockstep/order.py",
    "lockstep/kernels/",
)  # a mutant of these compiles the kernels anew
COMPILE_S = 300.0  # and may take so much longer before it hangs

OnStep = Callable[[str, bool], None]
Group = Sequence[Mutant]
Said = tuple[str, str]  # a unit, and "" if it is green or what it said


def nobody(note: str, bad: bool) -> None:
    """Takes no notice."""


@dataclass(frozen=True)
class Fate:
    """What became of one mutant."""

    id: str
    outcome: str  # killed, survived
    killer: str = ""
    detail: str = ""
    seconds: float = 0.0
    tried: tuple[str, ...] = ()  # units that were green with it
    mark: str = ""  # of the tests that this is true of: the killer's file, or all of them


@dataclass
class Journal:
    """Everything found so far, one JSON object a line."""

    path: Path
    fates: dict[str, Fate] = field(default_factory=dict)
    # (ids, unit) → "" if green, or what it said
    together: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                self._take(json.loads(line))

    def fate(self, fate: Fate) -> None:
        """Keeps what became of a mutant; a later one of the same mutant counts."""
        self._append({"fate": vars(fate)})

    def met(self, ids: str, unit: str, said: str) -> None:
        """Keeps what a unit said about several mutants at once."""
        self._append({"ids": ids, "unit": unit, "said": said})

    def _append(self, entry: dict[str, Any]) -> None:
        with self._lock:
            self._take(entry)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")

    def _take(self, entry: dict[str, Any]) -> None:
        if "fate" in entry:
            fate = Fate(**{**entry["fate"], "tried": tuple(entry["fate"]["tried"])})
            self.fates[fate.id] = fate
        else:
            self.together[entry["ids"], entry["unit"]] = entry["said"]


@dataclass
class Campaign:
    """Mutants, what may notice them, and where they are tried."""

    root: Path
    mutants: Sequence[Mutant]
    reach: Reach
    journal: Journal
    crew: Crew
    hints: Mapping[str, str] = field(default_factory=dict)  # id → a unit that killed it once
    tests: Mapping[str, str] = field(default_factory=dict)  # digests of the test files

    def __post_init__(self) -> None:
        self.times = {u.name: u.seconds for u in self.reach.units.values()}

    def todo(self) -> list[Mutant]:
        """Mutants that nobody has tried, or whose killer has changed; survivors, if any test
        has."""
        fates = self.journal.fates
        return [
            m
            for m in self.mutants
            if m.id not in fates or fates[m.id].mark != self._mark(fates[m.id].killer)
        ]

    def _mark(self, unit: str) -> str:
        """The state of the file of a test, or, of nobody, of all tests; a cell has none but the
        engine's."""
        if unit:
            return self.tests.get(unit.partition("::")[0], "")
        return digest(json.dumps(self.tests, sort_keys=True).encode())

    def alone(self, on_step: OnStep) -> None:
        """Every mutant against what reaches it."""
        for fate, mutant in self.crew.map(lambda m: (self._try(m), m), self.todo()):
            on_step(f"{mutant.file}:{mutant.line}", fate.outcome == "survived")

    def survivors(self) -> list[Mutant]:
        """Mutants that nobody has killed."""
        fates = self.journal.fates
        return [m for m in self.mutants if m.id in fates and fates[m.id].outcome == "survived"]

    def together(self, on_step: OnStep) -> None:
        """The survivors against everything they have not met."""
        for group in apart(self.survivors()):
            rest = self._rest(group)
            red = [u for u, said in self._meet(group, rest, on_step) if said]
            while red and group:
                unit = min(red, key=lambda u: self.times.get(u, 0.0))
                mutant = self._culprit(group, unit)
                if mutant is None:  # red by several at once, and by none of them alone
                    red.remove(unit)
                    continue
                detail, mark = self.journal.together[mutant.id, self._key(unit)], self._mark(unit)
                fate = replace(self.journal.fates[mutant.id], killer=unit, detail=detail)
                self.journal.fate(replace(fate, outcome="killed", mark=mark))
                group = [m for m in group if m.id != mutant.id]
                red = [u for u, said in self._meet(group, red) if said] if group else []

    def confirm(self, on_step: OnStep = nobody) -> None:
        """Runs every killer once more, alone and without a mutant; a kill by one that is red is
        none."""
        killers = {fate.killer for fate in self.journal.fates.values()}
        known = sorted(killers & set(self.reach.units))
        red = {unit for unit, said in self._meet([], known, on_step, alone=True) if said}
        for fate in [f for f in self.journal.fates.values() if f.killer in red]:
            why = f"only {fate.killer} turned red, which is red without it too"
            mark = self._mark("")
            self.journal.fate(replace(fate, outcome="survived", killer="", detail=why, mark=mark))

    def _try(self, mutant: Mutant) -> Fate:
        lines = () if mutant.at_import else mutant.lines
        units = [u.name for u in self.reach.of(mutant.file, lines)]
        units.sort(key=lambda name: name != self.hints.get(mutant.id))  # stable: the hint first
        begin = time.monotonic()
        said = self._ask(units, [mutant], stop=True, limit_s=MUTANT_S) if units else {}
        killer = next((name for name, what in said.items() if what), "")
        fate = Fate(
            id=mutant.id,
            outcome="killed" if killer else "survived",
            killer=killer,
            detail=said.get(killer, ""),
            seconds=round(time.monotonic() - begin, 1),
            tried=tuple(name for name, what in said.items() if not what),
            mark=self._mark(killer),
        )
        self.journal.fate(fate)
        return fate

    def _ask(self, units: Sequence[str], group: Group, **how: Any) -> dict[str, str]:
        """What units say about mutants that share a tree."""
        changes = combined(group, self.root)
        hang_s = COMPILE_S if any(file.startswith(COMPILED) for file in changes) else HANG_S
        job = Job(units=units, changes=changes, seconds=self.times, hang_s=hang_s, **how)
        return self.crew.run(job).verdicts()

    def _rest(self, group: Sequence[Mutant]) -> list[str]:
        """Units that a mutant of the group has met neither alone nor with all the others."""
        fates, ids = self.journal.fates, {m.id for m in group}
        met = set.intersection(*(set(fates[m.id].tried) for m in group))
        wider = {key: ids <= set(key.split()) for key in {key for key, _ in self.journal.together}}
        keys = {
            key
            for (group_ids, key), said in self.journal.together.items()
            if wider[group_ids] and not said
        }
        return [u.name for u in self.reach.rest(met) if self._key(u.name) not in keys]

    def _key(self, unit: str) -> str:
        """A unit as the journal names it: a changed test is another one."""
        mark = self._mark(unit)
        return f"{unit} {mark}" if mark else unit

    def _meet(
        self, group: Group, units: Sequence[str], on_step: OnStep = nobody, alone: bool = False
    ) -> list[Said]:
        """What each unit says about a group; what the journal has is not asked again. `alone`: in a
        process of its own."""
        ids = " ".join(sorted(m.id for m in group))
        known = self.journal.together
        new = [u for u in units if (ids, self._key(u)) not in known]
        asked = ([u] for u in new) if alone else batches(new, self.times)
        for said in self.crew.map(lambda batch: self._batch(batch, group), asked):
            for name, what in said.items():
                self.journal.met(ids, self._key(name), what)
                on_step(name, bool(what))
        return [(u, known[ids, self._key(u)]) for u in units]

    def _batch(self, units: Sequence[str], group: Group) -> dict[str, str]:
        """Every unit once; one that takes its process along costs the others nothing but a new
        one."""
        said: dict[str, str] = {}
        while left := [name for name in units if name not in said]:
            heard = self._ask(left, group, stop=False)
            said |= heard or dict.fromkeys(left, "the process ended before its first test")
        return said

    def rest_len(self) -> int:
        """How many units `together` will run at least."""
        return sum(len(self._rest(group)) for group in apart(self.survivors()))

    def _culprit(self, group: Sequence[Mutant], unit: str) -> Mutant | None:
        """The mutant that turns a unit red alone; with the whole group it is red."""
        if len(group) == 1:
            return group[0]
        middle = len(group) // 2
        for half in (group[:middle], group[middle:]):
            if self._meet(half, [unit])[0][1]:
                return self._culprit(half, unit)
        return None


def batches(units: Sequence[str], times: dict[str, float]) -> Iterator[list[str]]:
    """Units in processes of a reasonable length, in order."""
    batch: list[str] = []
    seconds = 0.0
    for unit in units:
        if batch and seconds + times.get(unit, 0.0) > BATCH_S:
            yield batch
            batch, seconds = [], 0.0
        batch.append(unit)
        seconds += times.get(unit, 0.0)
    if batch:
        yield batch
