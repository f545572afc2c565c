"""Programs that run only on a GPU: whatever they name in the package exists."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
OWNERS = {"engine", "runner", "scheduler", "speculation", "signature", "step", "plan", "bucket"}
PROGRAMS = [*sorted(ROOT.glob("bench/gpu/*.py")), *sorted(ROOT.glob("tests/gpu_*.py"))]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_name_a_gpu_program_uses_exists(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (ROOT, ROOT / "tests", path.parent):
        monkeypatch.syspath_prepend(str(place))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    for node in [n for n in named if isinstance(n.value, ast.Name)]:
        owner = vars(module).get(node.value.id)
        if isinstance(owner, ModuleType):
            assert hasattr(owner, node.attr), f"line {node.lineno}: {node.value.id}.{node.attr}"


def names_of(tree: ast.AST) -> set[str]:
    """Returns every name that a module defines or assigns to, and to attributes of `self`."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{node.attr}":
            found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return found


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_gpu_program_names_no_attribute_that_was_renamed(path: Path) -> None:
    """Attributes of engines and runners used to go unnoticed: only those of modules were looked up,
    and a program that measures drafts would have failed on its first row."""
    tree, used = ast.parse(path.read_text(encoding="utf-8")), dict[str, int]()
    for node in [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]:
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else ""
        owner = node.value.id if isinstance(node.value, ast.Name) else owner
        private = node.attr[0] == "_" and node.attr[1] != "_" and owner != "cuda"
        if owner in OWNERS or private:
            used[node.attr] = node.lineno
    ours = names_of(tree)
    for source in ROOT.glob("lockstep/**/*.py"):
        ours |= names_of(ast.parse(source.read_text(encoding="utf-8")))
    missing = {name: line for name, line in used.items() if name not in ours}
    assert not missing, "lockstep has no such names"


def test_a_hazard_report_is_judged_by_its_source_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    from gpu_sanitize import unexpected_places

    text = (ROOT / "lockstep/kernels/triton/hopper_decode.py").read_text("utf-8").splitlines()
    lines = [text.index("def decode_kernel(") + 1, text.index("    gl.warp_specialize([") + 1]
    told = "Read access at decode_kernel+0x110 in hopper_decode.py:"
    assert unexpected_places("\n".join(f"{told}{line} [9 hazards]" for line in lines)) == []
    assert unexpected_places(f"{told}{lines[1] - 1} [9 hazards]") != []
