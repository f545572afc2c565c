"""Historical bugs of this field, put back on purpose: the lab must go red.

A revert is a file in this package. Its docstring is the case file; `TARGET` names the function it
replaces, `revert(old)` makes the old, wrong one, and every cell in `CELLS` must fail. The engine
has no bug code: `swapped` installs the wrong function in every module that imported the right one,
and restores the right one in `finally`. A target that vanished or changed its parameters is an
error, so refactoring cannot disarm a revert.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from lockstep.types import RuleError

if TYPE_CHECKING:
    from torch import Tensor

ENVIRONMENT_VARIABLE = "LOCKSTEP_REVERT"  # revert to run a command with, worker processes included
SECTIONS = ("Summary", "Motivation", "Mechanism", "Key functions", "Symptom", "Risk and impact")


@dataclass(frozen=True)
class Revert:
    """One historical bug, ready to be put back."""

    name: str
    title: str
    story: dict[str, str]  # section -> text
    source: str
    target: str  # module:function or module:Class.method
    cells: tuple[str, ...]  # recipe/feature, each must fail
    related: tuple[str, ...]
    backend: str  # the one whose code the target is; "" for code that all share
    crash: bool  # whether killing the process counts
    equivalent: str  # the proof that no cell can notice it; "" for real bugs
    make: Callable[[Any], Any]


def names() -> list[str]:
    """Returns the names of all reverts, sorted."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__))


def load(name: str) -> Revert:
    """Returns the revert called `name`, with its case file parsed."""
    if name not in names():
        close = get_close_matches(name, names(), 1)
        raise RuleError(
            "a revert is a file in lab/reverts",
            repr(name),
            f"Did you mean {close[0]}?" if close else "See `lockstep lab reverts --list`",
        )
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    title, story = parse(name, module.__doc__ or "")
    equivalent = getattr(module, "EQUIVALENT", "")
    return Revert(
        name=name,
        title=title,
        story=story,
        source=module.SOURCE,
        target=module.TARGET,
        cells=tuple(getattr(module, "CELLS", ()) if equivalent else module.CELLS),
        related=tuple(getattr(module, "RELATED", ())),
        backend=getattr(module, "BACKEND", ""),
        crash=getattr(module, "CRASH", False),
        equivalent=equivalent,
        make=module.revert,
    )


def parse(name: str, text: str) -> tuple[str, dict[str, str]]:
    """Returns title and sections of a case file. Raises unless all of SECTIONS are there."""
    title, _, rest = inspect.cleandoc(text).partition("\n")
    story: dict[str, str] = {}
    section = ""
    for line in rest.splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            section = line.rstrip(":")
            story[section] = ""
        elif section:
            story[section] = f"{story[section]}\n{line.strip()}".strip()
    missing = [s for s in SECTIONS if not story.get(s)]
    if not title or missing:
        raise RuleError(
            f"a case file has a title and the sections {', '.join(SECTIONS)}",
            f"{name} without {', '.join(missing) or 'a title'}",
            "Add them",
        )
    return title, story


_FROZEN: dict[tuple[int, int], list[Tensor]] = {}  # copies on a GPU; never freed


def copied_once(tensor: Tensor) -> Tensor:
    """Returns a copy of `tensor` as of this step, which a recorded launch keeps reading on replay.
    A GPU cannot copy during capture: there it returns the copy of the plain run before."""
    import torch

    if tensor.device.type == "cpu":
        return torch.from_numpy(tensor.numpy().copy())
    made = _FROZEN.setdefault((tensor.data_ptr(), tensor.numel()), [])
    if not torch.cuda.is_current_stream_capturing():
        made.append(tensor.clone())
    return made[-1]


@contextmanager
def swapped(revert: Revert) -> Iterator[None]:
    """Replaces the right function by the wrong one in every module that has it, and always restores
    it."""
    owner, attribute, old = resolve(revert.target)
    new = revert.make(old)
    want, have = (list(inspect.signature(f).parameters) for f in (old, new))
    if want != have:
        raise RuleError(
            f"{revert.name} replaces {revert.target}({', '.join(want)})",
            f"({', '.join(have)})",
            "Adapt the revert to the target",
        )
    places = [(owner, attribute)]
    for module in [
        m for n, m in sys.modules.items() if n.startswith("lockstep.") and m is not owner
    ]:
        places += [(module, key) for key, value in vars(module).items() if value is old]
    try:
        for place, key in places:
            setattr(place, key, new)
        yield
    finally:
        for place, key in places:
            setattr(place, key, old)
        for module in [
            m for n, m in sys.modules.items() if n.startswith("lockstep.")
        ]:  # imported inside the block, with the bug in place
            for key in [key for key, value in vars(module).items() if value is new]:
                setattr(module, key, old)


@contextmanager
def from_environment() -> Iterator[Revert | None]:
    """Puts back the bug that LOCKSTEP_REVERT names, if it is set. The command line and every worker
    process run inside this."""
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    if not name:
        yield None
        return
    revert = load(name)
    with swapped(revert):
        yield revert


def resolve(target: str) -> tuple[Any, str, Any]:
    """Returns the module or class, the attribute name and the function that a target names."""
    module_name, _, path = target.partition(":")
    *outer, attribute = path.split(".")
    owner = importlib.import_module(module_name)
    try:
        for part in outer:
            owner = getattr(owner, part)
        return owner, attribute, vars(owner)[attribute]
    except (AttributeError, KeyError):
        raise RuleError(
            "a revert's target exists",
            target,
            "The code moved: set TARGET to the function that replaced it",
        ) from None
