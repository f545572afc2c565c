"""Where something ran: versions, commit, processor, platform, as one flat dictionary. A measurement
without this is worth nothing.

Asks the installed packages for their versions without importing them. The lab's documents, the
benchmarks and `check-env` use it.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lockstep import __version__

PACKAGES = ("torch", "numba", "llvmlite", "numpy", "transformers")
VECTORS = ("avx2", "avx512f")  # vector sets worth naming beside a processor


def environment() -> dict[str, str | int]:
    """Versions, commit, processor, cores, platform."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    packages = {name: _version(name) for name in PACKAGES}
    return {
        "lockstep": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        **packages,
        "cpu": cpu_model(),
        "cores": cores,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def cpu_model() -> str:
    """The processor's own name, with the vector sets that matter."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or "unknown"
    pairs = (line.partition(":") for line in info.read_text(encoding="utf-8").splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    name, flags = fields.get("model name", "unknown"), fields.get("flags", "").split()
    return " ".join([name, *(v for v in VECTORS if v in flags)])


def commit() -> str:
    """The commit of the checkout the package lies in, with + for local changes; "none" outside of
    one."""
    head, changed = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", "-uno")
    return "none" if head is None or changed is None else head + ("+" if changed else "")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
