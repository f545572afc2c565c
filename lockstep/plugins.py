"""Plugins by name: our own modules, and other packages' entry points of a group. A name has one
owner. A failed import is a reason that is shown. Used by `attention.select`, `kernels.select`."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lockstep.types import Refused, RuleError, check_one_of, did_you_mean


@dataclass(frozen=True)
class Plugins:
    """`own` maps names to our modules, whose `attribute` makes an object with all of `protocol`."""

    kind: str
    group: str
    attribute: str
    own: Mapping[str, str]
    protocol: type

    def names(self) -> list[str]:
        """Returns every name that can be asked for, ours first."""
        return [*self.own, *self.outside()]

    def make(self, name: str, *args: Any) -> Any:
        """Makes the plugin called `name` with `args`; raises Refused with a reason if it fails."""
        known, own = self.names(), self.own.get(name)
        remedy = did_you_mean(name, known, "Install the package that has it")
        check_one_of(known, f"a {self.kind}", name, remedy)
        entry = EntryPoint(name, f"{own}:{self.attribute}", "") if own else self.outside()[name]
        try:
            made = entry.load()(*args)
        except RuleError:
            raise
        except Exception as error:  # whatever a plugin's import or constructor raises
            rule, got = f"{self.kind} {name} can be loaded", f"{type(error).__name__}: {error}"
            raise Refused(rule, got, "Install what it needs, or use another") from error
        named = [*self.protocol.__annotations__, *vars(self.protocol)]
        missing = [each for each in named if each[0] != "_" and not hasattr(made, each)]
        if missing:
            rule = f"{self.kind} {name} has all of {self.protocol.__module__}.{self.attribute}"
            raise Refused(rule, f"no {', '.join(missing)}", "Add what is missing")
        return made

    def owned(self, name: str) -> str:
        """Returns the name in a fingerprint: another package's with distribution and version."""
        entry = self.outside().get(name)
        return name if entry is None else f"{name}({distribution(entry)})"

    def outside(self) -> dict[str, EntryPoint]:
        """Returns other packages' entry points by name. A name with two owners is an error."""
        found: dict[str, EntryPoint] = {}
        entries = entry_points(group=self.group)
        for entry in sorted(entries, key=lambda e: (e.name, e.value, distribution(e))):
            if entry.name in self.own:
                self._clash(entry, f"lockstep's own {self.own[entry.name]}")
            first = found.setdefault(entry.name, entry)
            if (first.value, distribution(first)) != (entry.value, distribution(entry)):
                self._clash(entry, f"{first.value} of {distribution(first)}")
        return found

    def _clash(self, entry: EntryPoint, other: str) -> None:
        rule = f"only one {self.kind} is called {entry.name}"
        got = f"{entry.value} of {distribution(entry)}, and {other}"
        raise RuleError(rule, got, "Uninstall one of the packages, or rename its entry point")


def distribution(entry: EntryPoint) -> str:
    """Returns name and version of the package that an entry point belongs to."""
    return "an unknown package" if entry.dist is None else f"{entry.dist.name}-{entry.dist.version}"
