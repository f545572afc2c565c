"""`lockstep bench attention|gemm|engine --device cuda`: the programs in bench/gpu of the
repository, each with its own peers, floors and ceilings, as one JSON document.

Knows where the programs lie and what they write; what is measured is theirs. Called by the
commands, in a clone of the repository on a machine with a card.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.kernels.select import select
from lockstep.lab.document import head, publish
from lockstep.types import RuleError

ROOT = Path(__file__).parent.parent.parent


def run(what: str, args: argparse.Namespace, *given: str) -> int:
    """Runs bench/gpu/<what>_h200.py, and publishes what it wrote."""
    program = ROOT / "bench" / "gpu" / f"{what}_h200.py"
    if not program.is_file():
        rule = "benchmarks of a card lie in bench/gpu of the repository"
        raise RuleError(rule, f"no {program}", "Run this in a clone of the repository")
    select("cuda", "auto")  # here, where its reason is one line
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(program), "--out", folder, *given]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        files = sorted(Path(folder).glob("*-h200*.json"))
        found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    failed = done.returncode or not found
    told = f"{program.name} ended with {done.returncode}" if failed else f"{', '.join(found)}"
    publish(args, {**head(), "results": found}, [told])
    return 1 if failed else 0


def gemm(args: argparse.Namespace) -> int:
    """`bench gemm`: our choice against cuBLAS, for the shapes of one model."""
    return run("gemm", args, "--model", args.shapes, "--chosen")
