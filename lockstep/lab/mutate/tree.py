"""Copies of the repository in which mutants live: nothing of the repository itself is ever changed.

A work folder holds one `template` and one tree per worker. A tree is made anew from the template
for every job, always under the same path: Numba keeps compiled code by the path and the time stamp
of its source, so a text that is not mutated is never compiled again, and what a mutant compiles
dies with its tree. Knows files only. `reach` and `campaign` call it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from lockstep.lab.mutate.trial import Place
from lockstep.types import RuleError

OWN = ("lockstep/lab/mutate/", "tests/test_mutate.py")
KERNELS = ".kernels"  # a tree's own cache folder, beside its files


def repository() -> Path:
    """The checkout that this package was imported from."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "tests").is_dir() or not (root / ".git").exists():
        rule = "mutants are made in a checkout, with its tests"
        raise RuleError(rule, f"{root} without tests/ or .git", "Run it in a clone")
    return root


def listed(root: Path) -> list[str]:
    """Every file that git knows or would take, relative."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    names = done.stdout.split("\0")
    return sorted({name for name in names if name and (root / name).is_file()})


def digests(root: Path) -> dict[str, str]:
    """Digest of every Python file of the package and the tests, and of what configures them; but of
    these tools."""
    found = [n for n in listed(root) if n.startswith(("lockstep/", "tests/")) and n.endswith(".py")]
    named = [n for n in found if not n.startswith(OWN)]
    return {name: digest((root / name).read_bytes()) for name in [*named, "pyproject.toml"]}


def digest(content: bytes) -> str:
    """Short, for comparing and naming."""
    return hashlib.sha256(content).hexdigest()[:16]


class Trees:
    """The template and the trees of a work folder."""

    def __init__(self, root: Path, work: Path) -> None:
        self.root, self.work = root, work
        self.template = work / "template"

    def renew(self) -> None:
        """Makes the template equal to the repository, its time stamps included."""
        names = listed(self.root)
        for name in names:
            there, here = self.template / name, self.root / name
            same = there.is_file() and there.stat().st_size == here.stat().st_size
            if same and there.read_bytes() == here.read_bytes():
                continue
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here, there)
        kept = set(names)
        for path in [p for p in self.template.rglob("*") if p.is_file()]:
            inside = path.relative_to(self.template)
            if str(inside) not in kept and not {"__pycache__", KERNELS} & set(inside.parts):
                path.unlink()

    def path(self, worker: int) -> Path:
        """Where the tree of a worker lies: always the same, see above."""
        return self.work / f"tree{worker}"

    def plant(self, worker: int, changes: Mapping[str, str]) -> Path:
        """A fresh tree of a worker in which the named files have other texts."""
        tree = self.path(worker)
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(self.template, tree)
        own = self.work / f"compiled{worker}"
        if own.is_dir():
            shutil.copytree(own, tree, dirs_exist_ok=True)
        for name, text in changes.items():
            (tree / name).write_text(text, encoding="utf-8")
        return tree

    def keep_compiled(self, worker: int) -> None:
        """What an unchanged tree has compiled is there at the next `plant` of the same worker."""
        tree, own = self.path(worker), self.work / f"compiled{worker}"
        for path in [p for p in tree.rglob("*") if p.is_file()]:
            name = path.relative_to(tree)
            if KERNELS in name.parts or path.suffix in (".nbi", ".nbc"):
                (own / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, own / name)

    def place(self, worker: int) -> Place:
        """Where the jobs of a worker are done."""
        tree = self.path(worker)
        environment = {
            "PYTHONPATH": str(tree),
            "XDG_CACHE_HOME": str(tree / KERNELS),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "LOCKSTEP_REVERT": "",
        }
        log, report = (self.work / f"worker{worker}.{end}" for end in ("log", "jsonl"))
        return Place(tree, environment, log, report)
