"""How the code reads, in figures: lines, lengths of functions, tokens and columns per line, and
three habits that make a line hard to read.

    python tools/measure.py                      this tree
    python tools/measure.py FOLDER [FOLDER ...]  other trees, ours or not, in the same way

Prints a Markdown table, which docs/reading.md contains. Lines and functions are counted whole, with
blank lines. Tokens and widths are those of code, without comments and docstrings. Conditional
expressions, calls and repeated lines are shares of the lines that are not blank; calls with `*args`
and repeated imports are not counted. Names are parameters and variables, once per binding.

Reads source text only; the standard library suffices. The ruler enforces limits, this compares.
"""

from __future__ import annotations

import ast
import io
import math
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MANY_ARGUMENTS = 6
BLOCK = 6  # consecutive lines of code that occur elsewhere, too, count as repeated
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
HEAD = (
    "",
    "lines",
    "function median / p95 / max",
    "tokens per line",
    "line width p95",
    "conditional expressions per 1,000 lines",
    f"calls with ≥ {MANY_ARGUMENTS} positional arguments per 1,000",
    "mean name",
    "repeated lines",
)


@dataclass(frozen=True)
class Source:
    """A file's text and syntax tree."""

    text: str
    tree: ast.Module

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def docstring_lines(self) -> set[int]:
        """The line numbers of docstrings."""
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found: set[int] = set()
        for node in self.nodes:
            if isinstance(node, documented) and ast.get_docstring(node) is not None:
                first = node.body[0]
                found |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        return found

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """All tokens but comments, docstrings and layout."""
        found = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [
            token
            for token in found
            if token.type not in LAYOUT_TOKENS and token.start[0] not in self.docstring_lines
        ]

    @cached_property
    def code_lines(self) -> list[str]:
        """The lines that contain a token."""
        numbers = {n for t in self.tokens for n in range(t.start[0], t.end[0] + 1)}
        return [self.lines[n - 1] for n in sorted(numbers)]

    @cached_property
    def statements(self) -> list[str]:
        """The code without imports and indentation: what may be repeated elsewhere."""
        code = (line.strip() for line in self.code_lines)
        return [line for line in code if not line.startswith(("import ", "from "))]


def row(title: str, paths: Iterable[Path]) -> str:
    """Returns the figures of some files together, as a line of the table."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    sources = [Source(text, ast.parse(text)) for text in texts]
    nodes = [node for source in sources for node in source.nodes]
    lines = [line for source in sources for line in source.lines]
    full = sum(bool(line.strip()) for line in lines)
    code = [line for source in sources for line in source.code_lines]
    tokens = sum(len(source.tokens) for source in sources)
    lengths = sorted(map(length, filter(is_function, nodes)))
    names = [name for node in nodes for name in bound(node)]
    cells = (
        title,
        f"{len(lines):,}",
        f"{statistics.median(lengths):.0f} / {p95(lengths)} / {lengths[-1]}",
        f"{tokens / len(code):.1f}",
        f"{p95(sorted(map(len, code)))}",
        f"{1000 * sum(isinstance(node, ast.IfExp) for node in nodes) / full:.1f}",
        f"{1000 * sum(map(is_long_call, nodes)) / full:.1f}",
        f"{statistics.mean(map(len, names)):.1f} letters",
        f"{100 * repeated([source.statements for source in sources]) / full:.1f} %",
    )
    return f"| {' | '.join(cells)} |"


def p95(rising: list[int]) -> int:
    """Returns the value that 95 % do not exceed."""
    return rising[math.ceil(0.95 * len(rising)) - 1]


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def length(node: Any) -> int:
    """Counts the lines from `def` to the end."""
    lines: int = node.end_lineno - node.lineno + 1
    return lines


def is_long_call(node: ast.AST) -> bool:
    """Returns whether a call has many positional arguments, none of them starred."""
    if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
        return False
    return len(node.args) >= MANY_ARGUMENTS


def bound(node: ast.AST) -> list[str]:
    """Returns the parameter or variable that a node binds."""
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return []


def repeated(files: list[list[str]]) -> int:
    """Counts the lines inside blocks of BLOCK lines that also occur elsewhere."""
    blocks = [[tuple(each[i : i + BLOCK]) for i in range(len(each) - BLOCK + 1)] for each in files]
    counts = Counter(block for each in blocks for block in each)
    inside = {
        (number, line)
        for number, each in enumerate(blocks)
        for first, block in enumerate(each)
        if counts[block] > 1
        for line in range(first, first + BLOCK)
    }
    return len(inside)


def shares(root: Path) -> dict[str, list[Path]]:
    """Returns a tree of ours by share: serving and judging code, without case files of reverts."""
    gpu = ("lockstep/kernels/triton/", "lockstep/kernels/cuda/")
    titles = {"lockstep/lab/reverts/": "", "lockstep/lab/": "lab without reverts"}
    titles |= {"lockstep/bench/": "bench", **dict.fromkeys(gpu, "GPU kernels"), "": "engine"}
    found: dict[str, list[Path]] = {title: [] for title in ("engine", *titles.values())}
    for path in sorted((root / "lockstep").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        found[next(titles[start] for start in titles if name.startswith(start))].append(path)
    return {title: files for title, files in found.items() if title and files}


def main(folders: list[str]) -> int:
    print(f"| {' | '.join(HEAD)} |")
    print(f"| {' | '.join('---' for _ in HEAD)} |")
    for folder in folders or [str(ROOT)]:
        root = Path(folder)
        ours = (root / "lockstep" / "order.py").exists()
        for title, files in (shares(root) if ours else {"": sorted(root.rglob("*.py"))}).items():
            print(row(f"{root.name} {title}".strip(), files))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
