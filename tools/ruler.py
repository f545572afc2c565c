"""The ruler: lines per folder, the longest file and the longest function of the package, against
its limits.

Knows source text only: nothing is imported, the standard library suffices. Called by `make ruler`
and by CI. Exits 1 above a limit.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

FILE_LIMIT = 600
FUNCTION_LIMIT = 60
# of what serves a request; the lab, its case files and the benchmarks are counted, but judge rather
# than serve
ENGINE_LIMIT = 17_000
JUDGES = ("lockstep/lab/", "lockstep/bench/")


class Function(NamedTuple):
    lines: (
        int  # from `def` to the last line; docstring and nested functions included, decorators not
    )
    name: str
    where: str  # file:line


def functions(path: Path, shown: str) -> list[Function]:
    """Every function of a file, methods and nested ones under their dotted name."""
    found: list[Function] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, prefix)
                continue
            name = prefix + child.name
            if not isinstance(child, ast.ClassDef):
                assert child.end_lineno is not None
                found.append(
                    Function(child.end_lineno - child.lineno + 1, name, f"{shown}:{child.lineno}")
                )
            visit(child, name + ".")

    visit(ast.parse(path.read_text(encoding="utf-8"), shown), "")
    return found


def measure(package: Path) -> tuple[dict[str, int], list[Function]]:
    """Lines per file and all functions, both keyed by paths that start at the package's own
    name."""
    lines: dict[str, int] = {}
    found: list[Function] = []
    for path in sorted(package.rglob("*.py")):
        shown = path.relative_to(package.parent).as_posix()
        lines[shown] = len(path.read_text(encoding="utf-8").splitlines())
        found += functions(path, shown)
    return lines, found


def complaints(lines: dict[str, int], found: list[Function]) -> list[str]:
    """One sentence per broken limit, with value and limit."""
    engine = engine_lines(lines)
    out = [
        f"{name} has {n} lines; the limit for a file is {FILE_LIMIT}"
        for name, n in lines.items()
        if n > FILE_LIMIT
    ]
    out += [
        f"{f.where} {f.name} has {f.lines} lines; the limit for a function is {FUNCTION_LIMIT}"
        for f in found
        if f.lines > FUNCTION_LIMIT
    ]
    if engine > ENGINE_LIMIT:
        out.append(f"the engine has {engine} lines; the limit is {ENGINE_LIMIT}")
    return out


def engine_lines(lines: dict[str, int]) -> int:
    """Lines of everything but what judges."""
    return sum(n for name, n in lines.items() if not name.startswith(JUDGES))


def main(package: Path) -> int:
    lines, found = measure(package)
    if not lines:
        print(f"no Python files under {package.name}/", file=sys.stderr)
        return 1
    folders: Counter[str] = Counter()
    for name, n in lines.items():
        folders[name.rpartition("/")[0]] += n
    for folder, n in sorted(folders.items()):
        print(f"{n:7,}  {folder}/")
    longest_file = max(lines, key=lambda name: lines[name])
    print(f"{engine_lines(lines):7,}  the engine (limit {ENGINE_LIMIT:,})")
    print(f"{sum(lines.values()):7,}  in all, {len(lines)} files")
    print(f"{lines[longest_file]:7,}  longest file: {longest_file} (limit {FILE_LIMIT})")
    if found:
        longest = max(found, key=lambda f: f.lines)
        print(
            f"{longest.lines:7,}  longest function: {longest.name}, {longest.where} (limit "
            f"{FUNCTION_LIMIT})"
        )
    broken = complaints(lines, found)
    for line in broken:
        print(f"over the limit: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent / "lockstep"))
