"""The API pages, docs/api/*.md: what the public boundaries take and return, read from the source.

    python tools/api.py            write them
    python tools/api.py --check    exit 1 if they are not what the source says

Signatures, docstrings and comments of fields are the pages' only text. Every tensor and array must
have a dtype and a shape, or the pages are not built: its docstring says `name dtype [shape]`, as in
"q activations [T, heads, d_qk]", or a field's comment begins with it, without the name. A result is
called `returns` or has a name of its own. The type tells the side: a tensor is on the device, a
numpy array on the host. Reads source text only: nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "api"
PAGES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "llm": (
        "Generate, score, embed",
        {
            "llm/api.py": ("LLM",),
            "sample/params.py": ("SamplingParams",),
            "config.py": ("EngineConfig",),
            "llm/output.py": ("Output", "Completion", "Chunk"),
        },
    ),
    "device": (
        "A device's table of operations",
        {"ops.py": ("Ops", "Routes", "Routing", "Heads", "CosSin", "Activation")},
    ),
    "engine": ("The engine", {"llm/engine.py": ("Engine", "load", "prepare", "Parts")}),
    "plan": (
        "A step, described",
        {
            "plan/step.py": ("StepPlan", "PagedGroup", "FreshGroup", "Bucket", "Real"),
            "plan/build.py": ("RequestWork", "RequestPages", "build"),
            "plan/image.py": ("PlanArrays", "ImageLayout"),
        },
    ),
    "backend": (
        "An attention backend",
        {
            "attention/base.py": ("Backend", "Caps", "visible", "score_constants"),
            "kv/pool.py": ("Keys",),
            "types.py": ("GroupSpec", "AttnSpec", "Layout"),
        },
    ),
}
ALIASES = {"Ints": "NDArray[np.int32]", "Floats": "NDArray[np.float32]"}
ARRAY = re.compile(r"\b(Tensor|NDArray)\b")
DTYPE = r"(?:activations|kv_dtype|integers|int\d+|float\d+)"
SAID = re.compile(rf"((?:\w+(?:,| and) )*\w+) ({DTYPE}) \[([^]]*)\]")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Array:
    """A documented tensor or array."""

    name: str
    dtype: str
    shape: str


class Undocumented(Exception):
    """A tensor of a public boundary without its shape, dtype or side."""


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    path: str
    lines: list[str]
    tree: ast.Module

    def find(self, name: str) -> ast.AST:
        """Returns the class or function called `name`."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return node
        raise LookupError(f"{self.path} has no {name}: correct PAGES in tools/api.py")

    def comment(self, node: ast.AnnAssign) -> str:
        """Returns the comment after a field, or the one above it."""
        own = self.lines[node.lineno - 1 : node.end_lineno]
        behind = [line.partition("  # ")[2].strip() for line in own if "  # " in line]
        if behind:
            return " ".join(behind)
        above: list[str] = []
        for line in reversed(self.lines[: node.lineno - 1]):
            if not line.strip().startswith("# "):
                break
            above.insert(0, line.strip()[2:])
        return " ".join(above)

    def header(self, node: Function) -> str:
        """Returns a function's signature, as written."""
        lines = self.lines[node.lineno - 1 : node.body[0].lineno - 1]
        return textwrap.dedent("\n".join(lines)).rstrip(": ")


def read(path: str) -> Module:
    """Reads a file of the package, by its path in it."""
    text = (ROOT / "lockstep" / path).read_text(encoding="utf-8")
    return Module(path, text.splitlines(), ast.parse(text))


def page(title: str, members: dict[str, tuple[str, ...]]) -> str:
    """Returns the text of a page."""
    note = "Made from the source by `make docs` (tools/api.py): change the source, not this page."
    out = [f"# {title}", "", f"<!-- {note} -->", ""]
    out += ["*Host* is numpy memory, *device* torch memory where the model lies.", ""]
    for path, names in members.items():
        module = read(path)
        for name in names:
            node = module.find(name)
            out += list(
                klass(module, node)
                if isinstance(node, ast.ClassDef)
                else function(module, node, f"lockstep.{dotted(path)}", "##")  # type: ignore
            )
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).rstrip() + "\n"


def dotted(path: str) -> str:
    """Converts plan/step.py to plan.step."""
    return path.removesuffix(".py").replace("/", ".")


def klass(module: Module, node: ast.ClassDef) -> Iterator[str]:
    """Yields a class: docstring, fields, public methods."""
    documented = ast.get_docstring(node) or ""
    fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and is_public(f.target)]
    text, meanings = columns(documented, {ast.unparse(field.target) for field in fields})
    yield from (f"## {node.name}", "", f"`lockstep.{dotted(module.path)}.{node.name}`", "")
    yield from prose(text)
    if fields:
        yield from ("| field | type | meaning |", "| --- | --- | --- |")
        for field in fields:
            yield field_row(module, node, field, arrays(documented), meanings)
        yield ""
    for method in node.body:
        if isinstance(method, Function) and is_shown(method):
            yield from function(module, method, node.name, "###")


def columns(documented: str, names: set[str]) -> tuple[str, dict[str, str]]:
    """Splits a docstring into text and its lines `field meaning`, by field."""
    kept: list[str] = []
    meanings: dict[str, str] = {}
    last = ""
    for line in documented.splitlines():
        match = re.match(r"(\w+) +(\S.*)", line)
        if match and match[1] in names and (last or line[len(match[1]) + 1] == " "):
            last = match[1]
            meanings[last] = match[2]
        elif last and line.strip():
            meanings[last] += " " + line.strip()
        else:
            last = ""
            kept.append(line)
    return "\n".join(kept), meanings


def is_public(target: ast.expr) -> bool:
    """Returns whether a field is public."""
    return isinstance(target, ast.Name) and not target.id.startswith("_")


def is_shown(method: Function) -> bool:
    """Returns whether a method is public and no overload."""
    marks = [ast.unparse(mark) for mark in method.decorator_list]
    return (
        method.name == "__init__" or not method.name.startswith("_")
    ) and "overload" not in marks


def field_row(
    module: Module,
    owner: ast.ClassDef,
    field: ast.AnnAssign,
    known: list[Array],
    meanings: dict[str, str],
) -> str:
    """Returns a field's table row: name, type with its default, and the comment."""
    name, kind, comment = (
        ast.unparse(field.target),
        annotated(field.annotation),
        module.comment(field),
    )
    said = {array.name: array for array in known}.get(name)
    if ARRAY.search(kind):
        dtype = re.search(r"np\.(\w+)", kind)
        shape = re.match(rf"(?:({DTYPE}) )?\[([^]]*)\] ?", comment)
        if said is None and shape is not None and (shape[1] or dtype):
            said = Array(name, shape[1] or dtype[1], shape[2])  # type: ignore[index]
            comment = comment[shape.end() :]
        if said is None:
            raise Undocumented(f"{module.path}: {owner.name}.{name}: {kind}")
        comment = f"{said.dtype} `[{said.shape}]`, {side(kind)}. {comment}"
    comment = f"{comment} {meanings.get(name, '')}".strip()
    default = f" = {ast.unparse(field.value)}" if field.value is not None else ""
    typed = (kind + default).replace("|", r"\|")
    return f"| `{name}` | `{typed}` | {comment} |"


def function(module: Module, node: Function, owner: str, level: str) -> Iterator[str]:
    """Yields a function or method: signature, docstring, table of its tensors."""
    documented = ast.get_docstring(node) or ""
    found = arrays(documented)
    check(module, node, owner, found)
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    kind = " (property)" if marks & {"property", "cached_property"} else ""
    yield from (f"{level} {node.name}{kind}", "")
    if owner.startswith("lockstep."):
        yield from (f"`{owner}.{node.name}`", "")
    yield from ("```python", module.header(node), "```", "")
    yield from prose(documented)
    if found:
        sides = {arg.arg: side(annotated(arg.annotation)) for arg in parameters(node)}
        yield from ("| | dtype | shape | side |", "| --- | --- | --- | --- |")
        for array in found:
            where = sides.get(array.name) or side(annotated(node.returns))
            yield f"| `{array.name}` | {array.dtype} | `[{array.shape}]` | {where} |"
        yield ""


def parameters(node: Function) -> list[ast.arg]:
    """Returns all parameters."""
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def annotated(annotation: ast.expr | None) -> str:
    """Returns a type as text, with aliases written out."""
    text = ast.unparse(annotation) if annotation else ""
    return re.sub(r"\w+", lambda word: ALIASES.get(word[0], word[0]), text)


def side(kind: str) -> str:
    """Returns "device" or "host" for a tensor or array, "" for anything else."""
    return "device" if "Tensor" in kind else "host" if "NDArray" in kind else ""


def check(module: Module, node: Function, owner: str, found: list[Array]) -> None:
    """Raises unless every tensor that is taken or returned is described."""
    said = {array.name for array in found}
    given = {arg.arg: annotated(arg.annotation) for arg in parameters(node)}
    for name, kind in given.items():
        if ARRAY.search(kind) and name not in said:
            raise Undocumented(f"{module.path}: {owner}.{node.name}({name}: {kind})")
    returned = annotated(node.returns)
    wanted = len(ARRAY.findall(returned)) if returned.startswith("tuple[") else 1
    if ARRAY.search(returned) and len(said - set(given)) < wanted:
        raise Undocumented(f"{module.path}: {owner}.{node.name}() -> {returned}")


def arrays(documented: str) -> list[Array]:
    """Returns the tensors that a docstring describes."""
    text = " ".join(documented.split())
    return [
        Array(name, match[2], match[3])
        for match in SAID.finditer(text)
        for name in re.split(r", | and ", match[1])
        if name not in ("of", "from", "their", "the", "all")
    ]


def prose(documented: str) -> Iterator[str]:
    """Yields a docstring's paragraphs, with those set in columns as code blocks."""
    for paragraph in documented.split("\n\n"):
        lines = paragraph.splitlines()
        columns = sum(bool(re.match(r"\S+ {2,}\S| {4}", line)) for line in lines)
        yield from ("```", *lines, "```", "") if columns > len(lines) / 2 else (*lines, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a page is old"
    )
    args = parser.parse_args()
    try:
        pages = {f"{name}.md": page(title, members) for name, (title, members) in PAGES.items()}
    except Undocumented as error:
        print(f"a tensor without dtype and shape: {error}", file=sys.stderr)
        return 1
    if not args.check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        return 0
    old = [
        n
        for n, t in pages.items()
        if not (FOLDER / n).exists() or (FOLDER / n).read_text("utf-8") != t
    ]
    for name in old:
        print(f"docs/api/{name} is not what the source says: run `make docs`", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
