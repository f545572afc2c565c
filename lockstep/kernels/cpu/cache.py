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
from numba.core import event

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
    share their outermost text. Yields False if that cannot be written."""
    with _SETTING:
        before, place = config.CACHE_DIR, folder() / name
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:
            yield False
            return
        config.CACHE_DIR = str(place)
        try:
            yield True
        finally:
            config.CACHE_DIR = before


class _Announcer(event.Listener):
    """Says on stderr, once, that a compilation began."""

    def __init__(self, text: str) -> None:
        self.text: str | None = text

    def on_start(self, event: Any) -> None:
        if self.text:
            print(self.text, file=sys.stderr, flush=True)
            self.text = None

    def on_end(self, event: Any) -> None:
        pass


@contextlib.contextmanager
def announced(text: str) -> Iterator[None]:
    """Print `text` if something is really compiled inside: nothing is said where the cache has
    it."""
    with event.install_listener("numba:compile", _Announcer(text)):
        yield
