"""The ruler: lines per folder, the longest file and the longest function of the package, against
its limits; with `--base REV` also how each total has changed since that commit.

Knows source text only: nothing is imported, the standard library suffices. Called by `make ruler`
and by CI. Exits 1 above a limit.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FILE_LIMIT = 600
FUNCTION_LIMIT = 60


class Share(NamedTuple):
    """A part of the package that has a limit of its own."""

    name: str
    includes: tuple[str, ...]  # prefixes of paths
    excludes: tuple[str, ...]
    limit: int
    goal: int


GPU = (  # never run by an engine on a CPU
    "lockstep/kernels/triton/",
    "lockstep/kernels/cuda/",
    "lockstep/attention/triton.py",
    "lockstep/run/graph.py",
)
JUDGES = ("lockstep/lab/", "lockstep/bench/")  # judge rather than serve
CASE_FILES = ("lockstep/lab/reverts/",)
ALL = ("lockstep/",)
SPECULATION = ("lockstep/spec/",)
SHARES = (
    Share("the engine for a CPU", ALL, JUDGES + GPU + SPECULATION, limit=14_000, goal=14_000),
    Share("with a GPU", ALL, JUDGES + SPECULATION, limit=17_000, goal=17_000),
    Share("with a GPU and speculation", ALL, JUDGES, limit=18_500, goal=18_500),
    Share("lab and bench without case files", JUDGES, CASE_FILES, limit=9_000, goal=9_000),
)


class Function(NamedTuple):
    lines: int  # from `def` to the last line: docstring and nested functions too, no decorators
    name: str
    where: str  # file:line


def functions(path: Path, shown: str) -> list[Function]:
    """Returns every function of a file; methods and nested ones have dotted names."""
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
    """Returns lines per file, keyed by paths that start with the package's name, and all
    functions."""
    lines: dict[str, int] = {}
    found: list[Function] = []
    for path in sorted(package.rglob("*.py")):
        shown = path.relative_to(package.parent).as_posix()
        lines[shown] = len(path.read_text(encoding="utf-8").splitlines())
        found += functions(path, shown)
    return lines, found


def complaints(lines: dict[str, int], found: list[Function]) -> list[str]:
    """Returns one sentence per exceeded limit, with value and limit."""
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
    for share in SHARES:
        n = share_lines(lines, share)
        if n > share.limit:
            out.append(f"{share.name}: {n} lines; the limit is {share.limit}")
    return out


def share_lines(lines: dict[str, int], share: Share) -> int:
    """Counts the lines of a share."""
    return sum(
        n
        for name, n in lines.items()
        if name.startswith(share.includes) and not name.startswith(share.excludes)
    )


def lines_at(revision: str) -> dict[str, int]:
    """Returns lines per file of the package at a commit."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision, "lockstep"], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return measure(Path(folder) / "lockstep")[0]


def report(lines: dict[str, int], found: list[Function], base: dict[str, int] | None) -> None:
    """Prints folders, shares, the longest file and function."""

    def change(now: int, before: int) -> str:
        return "" if base is None else f"{now - before:+7,}  "

    folders, old_folders = by_folder(lines), by_folder(base or {})
    for folder in sorted(folders | old_folders):
        n = folders[folder]
        print(f"{n:7,}  {change(n, old_folders[folder])}{folder}/")
    for share in SHARES:
        n, limits = share_lines(lines, share), f"(limit {share.limit:,}, goal {share.goal:,})"
        print(f"{n:7,}  {change(n, share_lines(base or {}, share))}{share.name} {limits}")
    total = sum(lines.values())
    print(f"{total:7,}  {change(total, sum((base or {}).values()))}in all, {len(lines)} files")
    longest_file = max(lines, key=lambda name: lines[name])
    print(f"{lines[longest_file]:7,}  longest file: {longest_file} (limit {FILE_LIMIT})")
    longest = max(found, key=lambda f: f.lines)
    place = f"{longest.name}, {longest.where}"
    print(f"{longest.lines:7,}  longest function: {place} (limit {FUNCTION_LIMIT})")


def by_folder(lines: dict[str, int]) -> Counter[str]:
    """Sums the lines per folder."""
    folders: Counter[str] = Counter()
    for name, n in lines.items():
        folders[name.rpartition("/")[0]] += n
    return folders


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", metavar="REV", help="print the change since this commit, too")
    args = parser.parse_args()
    lines, found = measure(ROOT / "lockstep")
    report(lines, found, lines_at(args.base) if args.base else None)
    broken = complaints(lines, found)
    for line in broken:
        print(f"over the limit: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
