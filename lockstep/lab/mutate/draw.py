"""Small mutants of a module, drawn by a seed; operators and mutated texts are cosmic-ray's.

Only its operators that change a little are used (mutate.toml). Mutants that do not compile or are
the same program, annotations, the `strict=` of zip and a second mutant of a line are left out.
"""

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import Any

from lockstep.lab.mutate.pool import TABLE, digest
from lockstep.types import RuleError


@dataclass(frozen=True)
class Mutant:
    id: str
    module: str  # as the user named it; each module has its own draw
    file: str
    line: int
    operator: str
    diff: str
    start: int  # text[start:stop] becomes `text`
    stop: int
    text: str
    changed: frozenset[tuple[str, int]]  # file and line of everything in text[start:stop]


@dataclass(frozen=True)
class Place:
    """A place to which an operator applies."""

    file: str
    operator: str
    occurrence: int
    line: int
    lot: str  # the key by which places are drawn, without the line number


def files_of(name: str, root: Path) -> list[str]:
    """Returns the files of a module: `plan`, `lockstep.plan.build` or `lockstep/plan/build.py`."""
    parts = name.removesuffix(".py").replace("/", ".").split(".")
    parts = parts if parts[0] == "lockstep" else ["lockstep", *parts]
    file = root.joinpath(*parts).with_suffix(".py")
    paths = [file] if file.is_file() else file.with_suffix("").rglob("*.py")
    found = sorted(str(path.relative_to(root)) for path in paths)
    if not found:
        rule = "a module is a package or a file of lockstep, like plan or lockstep/plan/build.py"
        raise RuleError(rule, repr(name), "See the file tree in README.md")
    return found


def draw(
    names: Sequence[str], root: Path, seed: int, count: int, skip: Sequence[str] = ()
) -> list[Mutant]:
    """Returns `count` mutants of each module, or all if there are fewer. No two change the same
    line, so all of them fit into one tree."""
    drawn, taken = list[Mutant](), set[tuple[str, int]]()
    for name in names:
        own, every = list[Mutant](), candidates(name, root, seed, skip)
        while len(own) < count and (mutant := next(every, None)):
            if not mutant.changed & taken:
                taken |= mutant.changed
                own.append(mutant)
        drawn += sorted(own, key=lambda m: (m.file, m.line))
    return drawn


def candidates(name: str, root: Path, seed: int, skip: Sequence[str]) -> Iterator[Mutant]:
    """Yields every mutant of a module, in the order of a digest of seed and place: an edit
    elsewhere in the module leaves a drawn mutant in the draw."""
    named = [file for file in files_of(name, root) if not any(word in file for word in skip)]
    texts = {file: (root / file).read_text(encoding="utf-8") for file in named}
    found = [place for file, text in texts.items() for place in places(file, text)]
    found.sort(key=lambda place: digest(f"{seed} {place.lot}".encode()))
    made = (make(name, place, texts[place.file]) for place in found)
    return filter(None, made)


def places(file: str, text: str) -> list[Place]:
    """Returns every place in a text where an operator applies, as cosmic-ray counts them."""
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes, lines, dead = list(ast_nodes(get_ast(text))), text.splitlines(), dead_spans(text)
    out: list[Place] = []
    for name, operator in operators().items():
        count = 0
        for node in nodes:
            for turn, ((line, column), _) in enumerate(operator.mutation_positions(node)):
                if not any(a <= (line, column) < b for a, b in dead):
                    # an operator may have several mutants at one place
                    lot = f"{file} {name} {column} {turn} {lines[line - 1]}"
                    out.append(Place(file, name, count, line, lot))
                count += 1
    return out


@cache
def operators() -> dict[str, Any]:
    from cosmic_ray.plugins import get_operator

    pairs = [f"Replace{kind}_{pair}" for kind, each in TABLE["pairs"].items() for pair in each]
    return {name: get_operator(f"core/{name}")() for name in (*pairs, *TABLE["operators"])}


def dead_spans(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns (line, column) spans that are not mutated: annotations, `strict=` of zip."""
    found: list[Any] = []
    for node in ast.walk(ast.parse(text)):
        found += [getattr(node, "returns", None), getattr(node, "annotation", None)]
        if isinstance(node, ast.keyword) and node.arg == "strict":
            found.append(node.value)
    dead = [each for each in found if each is not None]
    return [((a.lineno, a.col_offset), (a.end_lineno, a.end_col_offset)) for a in dead]


def make(name: str, place: Place, text: str) -> Mutant | None:
    """Returns the mutant of a place; None if it does not compile or is the same program."""
    from cosmic_ray.mutating import mutate_code

    mutated = mutate_code(text, operators()[place.operator], place.occurrence)
    if mutated is None or statements(mutated) in ([], statements(text)):
        return None
    start, stop, new = span(text, mutated)
    short = text[:start] + new.strip() + text[stop:]  # cosmic-ray writes a blank before a number
    mutated = short if statements(short) == statements(mutated) else mutated
    start, stop, new = span(text, mutated)
    first, last = (text.count("\n", 0, at) for at in (start, stop))
    lines = text.splitlines(), mutated.splitlines(), f"a/{place.file}", f"b/{place.file}"
    was, now = statements(text), statements(mutated)
    at = next(i for i in range(len(was)) if was[i] != now[i])
    # which of the equal statements, and its change: neither prose nor line numbers change an id
    change = [place.file, str(was[:at].count(was[at])), was[at], now[at]]
    return Mutant(
        id=digest("\n".join(change).encode())[:12],
        module=name,
        file=place.file,
        line=place.line,
        operator=place.operator,
        diff="\n".join(difflib.unified_diff(*lines, lineterm="")),
        start=start,
        stop=stop,
        text=new,
        changed=frozenset((place.file, line) for line in range(first, last + 1)),
    )


@lru_cache(maxsize=64)
def statements(text: str) -> list[str]:
    """Returns the statements of a program, one line each, without comments and with empty
    docstrings; none if it does not compile."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ...
    return ast.unparse(tree).splitlines()


def span(text: str, mutated: str) -> tuple[int, int, str]:
    """Returns the shortest (start, stop, new) with text[:start] + new + text[stop:] == mutated."""
    start = len(commonprefix([text, mutated]))  # noqa: RUF071 - of characters
    end = len(commonprefix([text[start:][::-1], mutated[start:][::-1]]))  # noqa: RUF071
    return start, len(text) - end, mutated[start : len(mutated) - end]


def combined(mutants: Sequence[Mutant], root: Path) -> dict[str, str]:
    """Returns file → text with all these mutants in it."""
    texts: dict[str, str] = {}
    for m in sorted(mutants, key=lambda m: (m.file, -m.start)):
        text = texts.get(m.file) or (root / m.file).read_text(encoding="utf-8")
        texts[m.file] = text[: m.start] + m.text + text[m.stop :]
    return texts
