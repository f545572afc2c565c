"""Which layer may import which: the order of the layers, read from the source; and the torch-free
half, imported with torch blocked.

The order is `order, types, ops, config` ← plan ← kv ← sample ← kernels ← attention ← nn ← models ←
run ← spec ← llm ← serve. Imports inside functions and under TYPE_CHECKING count like any other: a
hidden dependency is still a dependency.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lockstep"

BASE = {"order", "types", "ops", "plugins", "config", "progress", "folder", "outfile"}
CHAIN = [
    "plan",
    "kv",
    "sample",
    "kernels",
    "attention",
    "nn",
    "models",
    "run",
    "spec",
    "llm",
    "serve",
]
SIDE = {"text", "sched"}  # joined with the rest by `llm` and `serve`
TOOLS = {"lab", "bench"}  # may import everything; imported by `cli` alone, inside functions
FACE = {"cli", "__main__"}
UNITS = BASE | set(CHAIN) | SIDE | TOOLS | FACE
# modules of kv and run without tensors, the only ones of theirs that sched may import
HOST = {"kv": {"tables", "prefix"}, "run": {"kind"}}

TORCH_FREE = ("plan", "sched", *(f"{u}.{name}" for u, names in HOST.items() for name in names))


class Import(NamedTuple):
    target: str  # dotted, names included: `from lockstep.kv import tables` gives lockstep.kv.tables
    line: int
    in_function: bool


def modules() -> dict[str, Path]:
    """Returns dotted name → file, for every module of the package."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def targets(node: ast.AST, package: str) -> list[str]:
    """Returns the absolute names that one statement or call imports. `package` is what a leading
    dot stands for."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        stem = ".".join(part for part in (base, node.module) if part)
        return [stem if alias.name == "*" else f"{stem}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {
        "import_module",
        "importlib.import_module",
        "__import__",
    }:
        return [
            arg.value
            for arg in node.args[:1]
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
    return []


def imports(source: str, name: str, is_package: bool = False) -> list[Import]:
    """Returns all imports of Lockstep's own modules in a source text, at any depth."""
    package = name if is_package else name.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, in_function: bool) -> None:
        for target in targets(node, package):
            if target.split(".")[0] == PACKAGE:
                found.append(Import(target, getattr(node, "lineno", 0), in_function))
        inside = in_function or isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def unit(dotted: str) -> str:
    """Returns the layer a dotted name belongs to; "" for the package itself and the names it
    exports."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in UNITS else ""


def sees(importer: str) -> set[str]:
    """Returns the layers that a layer may import, its own included. "" is `lockstep` itself, whose
    lazy names lead to `llm`."""
    everything = UNITS | {""}
    if importer in TOOLS:
        return everything
    if importer == "cli":
        return everything - {"__main__"}
    if importer == "__main__":
        return {"cli"}
    if importer == "":
        return everything - TOOLS - FACE
    if importer in BASE:
        return BASE
    if importer == "text":
        return {"text", "types", "folder"}
    if importer == "sched":
        return BASE | {"plan", "kv", "run", "sched"}
    above = {"", *SIDE} if importer in {"llm", "serve"} else set()
    above |= {"sched"} if importer == "spec" else set()  # it drafts for sched's requests
    return BASE | set(CHAIN[: CHAIN.index(importer) + 1]) | above


def offences(source: str, name: str, is_package: bool = False) -> list[str]:
    """Returns one line per import that the order does not allow."""
    importer, out = unit(name), []
    if name != PACKAGE and not importer:
        return [f"{name}: its layer has no place in the order; give it one here and in the design"]
    for found in imports(source, name, is_package):
        target = unit(found.target)
        if found.target == f"{PACKAGE}.__version__":
            continue
        where = f"{name}:{found.line} imports {found.target}"
        if target not in sees(importer):
            out.append(f"{where}: {importer or PACKAGE} may see {sorted(sees(importer) - {''})}")
        elif importer == "cli" and target in TOOLS and not found.in_function:
            out.append(f"{where}: at module level; import it inside the function that needs it")
        elif (
            importer == "sched"
            and target in HOST
            and not HOST[target] & set(found.target.split(".")[2:3])
        ):
            out.append(f"{where}: sched sees only the host half of {target}: {HOST[target]}")
    return out


def test_modules_follow_the_import_order():
    found = modules()
    assert len(found) > 1, f"no modules under {PACKAGE}/: this test would pass on nothing"
    bad = [
        line
        for name, path in found.items()
        for line in offences(path.read_text("utf-8"), name, path.name == "__init__.py")
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("lockstep.plan.step", "from lockstep.kv.tables import PagePool"),
        ("lockstep.plan.step", "from lockstep import kv"),
        ("lockstep.plan.step", "from ..kv import tables"),
        ("lockstep.plan.step", "def f():\n    import lockstep.attention.base"),
        ("lockstep.plan.step", "class A:\n    def f(self):\n        from lockstep import LLM"),
        ("lockstep.plan.step", "if TYPE_CHECKING:\n    from lockstep.kv.pool import Pool"),
        ("lockstep.kv.pool", "importlib.import_module('lockstep.kernels.cpu.attend')"),
        ("lockstep.kernels.cpu.attend", "from lockstep.attention.base import Caps"),
        ("lockstep.order", "from lockstep.plan import step"),
        ("lockstep.text", "from lockstep.plan.step import StepPlan"),
        ("lockstep.sched.request", "from lockstep.kv.pool import Pool"),
        ("lockstep.sched.request", "from lockstep.kv import pool"),
        ("lockstep.sched.request", "import lockstep.kv"),
        ("lockstep.sched.request", "from lockstep.run.runner import Runner"),
        ("lockstep.run.runner", "from lockstep.sched.request import Decoding"),
        ("lockstep.serve.app", "def f():\n    from lockstep.lab import cells"),
        ("lockstep.llm", "from lockstep import bench"),
        ("lockstep.cli", "from lockstep.lab import runner"),
        ("lockstep", "def f():\n    from .lab import runner"),
        ("lockstep.utils", "import os"),
    ],
)
def test_the_import_checker_reports_a_violation(name: str, source: str):
    assert len(offences(source, name, is_package=name == PACKAGE)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "lockstep.kernels.cpu.attend",
            "from lockstep.plan.address import paged\nfrom lockstep import order, __version__",
        ),
        (
            "lockstep.attention.cpu",
            "from . import base\nfrom ..kernels.cpu import attend\nimport torch, numpy.typing",
        ),
        (
            "lockstep.sched.request",
            "from lockstep.kv import tables\nfrom lockstep.kv.prefix import Prefix\nfrom "
            "lockstep.plan import step\nfrom lockstep.run.kind import StepKind",
        ),
        ("lockstep.llm", "from lockstep.sched import scheduler\nfrom lockstep.text import Detok"),
        (
            "lockstep.lab.cells",
            "from lockstep import LLM\nfrom lockstep.serve import app\nfrom lockstep.bench import "
            "attention",
        ),
        (
            "lockstep.cli",
            "def lab():\n    from lockstep.lab import runner\n    from lockstep import bench",
        ),
    ],
)
def test_the_import_checker_accepts_allowed_imports(name: str, source: str):
    assert offences(source, name) == []


def without_torch(names: list[str]) -> str:
    """Imports `names` in a fresh interpreter where torch cannot be imported. Returns the failures,
    one per line."""
    code = """
import importlib, sys
sys.modules["torch"] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""
    run = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_host_modules_need_no_torch():
    free = tuple(f"{PACKAGE}.{name}" for name in TORCH_FREE)
    names = [
        name
        for name in modules()
        if name == PACKAGE
        or name in free
        or name.startswith(tuple(f"{prefix}." for prefix in free))
    ]
    assert len(names) > 1, f"nothing of {free} exists: this test would pass on nothing"
    failures = without_torch(names)
    assert not failures, failures


def test_torch_is_really_blocked():
    assert without_torch(["torch.nn"]).startswith("torch.nn: ")
