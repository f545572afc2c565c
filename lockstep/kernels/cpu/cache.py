"""Where compiled kernels are kept, and when they are stale.

Numba watches the one file of the function it caches; the kernel is made of several. So the cache
folder is named by a digest of every source of the kernel, the versions of the compilers and the
processor: another text, another folder. Knows nothing of attention.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba.core.config

from lockstep import order
from lockstep.kernels.cpu.loops import TARGET
from lockstep.plan import address

config: Any = numba.core.config
_SETTING = threading.RLock()  # one thread at a time names the folder


def sources() -> list[Path]:
    """Every file whose text ends up in the kernel."""
    return [
        *sorted(Path(__file__).parent.glob("*.py")),
        Path(address.__file__),
        Path(order.__file__),
    ]


def folder() -> Path:
    """The cache folder of these sources on this machine."""
    digest = hashlib.sha256()
    for part in (sys.version, numba.__version__, llvmlite.__version__, *TARGET):
        digest.update(part.encode())
    for path in sources():
        digest.update(path.name.encode() + path.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "lockstep" / f"cpu-{digest.hexdigest()[:16]}"


@contextlib.contextmanager
def cached_here(name: str) -> Iterator[bool]:
    """What is compiled inside with `cache=True` is kept in `folder()`, under its own name: kernels
    share their outermost text. Says on stderr what has to be compiled; yields False if it cannot be
    kept."""
    with _SETTING:
        before, place, writable = config.CACHE_DIR, folder() / name, True
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:
            writable = False
        if not writable or not any(place.rglob("*.nbc")):
            text = f"compiling the CPU {name} kernel, once per machine ..."
            print(text, file=sys.stderr, flush=True)
        config.CACHE_DIR = str(place) if writable else before
        try:
            yield writable
        finally:
            config.CACHE_DIR = before
