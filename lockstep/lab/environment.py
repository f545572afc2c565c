"""Where something ran: versions, processor, platform, as one flat dictionary. A measurement without this is worth nothing.

Asks the installed packages for their versions without importing them. The lab's documents, the benchmarks and `check-env` use it.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lockstep import __version__

PACKAGES = ("torch", "numba", "llvmlite", "numpy")


def environment() -> dict[str, str | int]:
    """Versions, processor, cores, platform."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    packages = {name: _version(name) for name in PACKAGES}
    return {
        "lockstep": __version__,
        "python": platform.python_version(),
        **packages,
        "cpu": cpu_model(),
        "cores": cores,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def cpu_model() -> str:
    """The processor's own name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
