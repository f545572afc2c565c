"""The disk cache of compiled kernels.

Numba invalidates by the one file of the function that it caches, but a kernel is made of several.
So the folder is named by a digest of all sources, the compilers' versions and the processor.
"""

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
from lockstep.sample import formulas
from lockstep.types import KV_FORMATS

config: Any = numba.core.config
_SETTING = threading.RLock()  # held while CACHE_DIR is changed


def sources() -> list[Path]:
    """Returns every file whose code is compiled into a kernel."""
    elsewhere = [Path(module.__file__ or "") for module in (address, formulas, order)]
    return [*sorted(Path(__file__).parent.glob("*.py")), *elsewhere]


def folder() -> Path:
    """Returns the cache folder of these sources on this machine."""
    digest = hashlib.sha256()
    for part in (sys.version, numba.__version__, llvmlite.__version__, repr(KV_FORMATS), *TARGET):
        digest.update(part.encode())
    for path in sources():
        digest.update(path.name.encode() + path.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "lockstep" / f"cpu-{digest.hexdigest()[:16]}"


@contextlib.contextmanager
def cached_here(name: str) -> Iterator[bool]:
    """Caches what is compiled in the block in `folder() / name`; kernels need a name because they
    share their outermost function. Yields False if the folder cannot be created."""
    with _SETTING:
        before, place, writable = config.CACHE_DIR, folder() / name, True
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:
            writable = False
        if not writable or not any(place.rglob("*.nbc")):
            print(f"compiling CPU kernel {name}, once per machine ...", file=sys.stderr, flush=True)
        config.CACHE_DIR = str(place) if writable else before
        try:
            yield writable
        finally:
            config.CACHE_DIR = before
