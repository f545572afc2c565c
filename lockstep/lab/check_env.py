"""`lockstep check-env`: what is installed, where it runs, which backends work and why.

Takes parsed arguments and returns an exit code; `cli` calls it.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from lockstep.attention import select
from lockstep.kernels.cpu import cache
from lockstep.lab import document
from lockstep.lab.environment import environment


def run(args: Namespace) -> int:
    """`check-env`. As many threads as torch has work in the kernels."""
    found: document.Document = {
        "environment": environment(),
        "threads": torch.get_num_threads(),
        "kernels": kernel_folder(),
        "backends": {name: inspect_backend(name) for name in select.names()},
    }
    rows = [*found["environment"].items(), *((k, found[k]) for k in ("threads", "kernels"))]
    for name, backend in found["backends"].items():
        state = "available" if backend["available"] else "NOT available"
        rows.append((name, f"{state}: {backend['reason']}"))
    document.publish(args, found, document.aligned([(name, str(told)) for name, told in rows]))
    return 0


def inspect_backend(name: str) -> dict[str, Any]:
    """What a backend states, or why it cannot be had."""
    try:
        caps = select.load(name).caps
    except Exception as error:  # of another package that cannot be imported: a reason to show
        return {"available": False, "reason": f"{type(error).__name__}: {error}"}
    invariances = ", ".join(sorted(caps.invariances))
    bits = f"bits promised over {invariances}" if invariances else "values only"
    reason = f"{', '.join(sorted(caps.devices))}; order {caps.order}; {bits}"
    return {"available": True, "reason": reason}


def kernel_folder() -> str:
    """Where the compiled CPU kernel is kept, and whether it is there."""
    folder = cache.folder()
    count = len(list(folder.rglob("*.nbc"))) if folder.is_dir() else 0
    found = f"{count} compiled" if count else "nothing yet: the first run compiles"
    return f"{folder} ({found})"
