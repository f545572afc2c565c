"""How large the cases of `bench engine` are, and what they share: the models, loaded once into each
contender.

Knows folders and loaders; what is measured with them is written in `cases` and `curves`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.bench.machine import Timing, note, turns
from lockstep.bench.scheduler import Load
from lockstep.bench.work import Ours
from lockstep.llm.engine import BUILTIN

if TYPE_CHECKING:
    from lockstep.bench.peers import Peer

LOAD = Load(64, 2048, 200)


@dataclass(frozen=True)
class Sizes:
    """How large the cases are."""

    decode: tuple[int, int] = (64, 128)  # prompt, new tokens
    requests: int = 32
    ins: tuple[int, int] = (16, 512)
    outs: tuple[int, int] = (16, 256)
    # new tokens of a request at most, when tokens are compared and the peer's settings chosen
    trial: int = 64
    prefix: tuple[int, int] = (1024, 16)  # cached, new
    load: Load = LOAD
    steps: int = 32  # of a point of a curve
    crowds: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    small: bool = False  # whether a small llama stands in for the one of 100 M


FULL = Sizes()
QUICK = Sizes(
    (16, 8), 4, (8, 32), (2, 12), 8, (64, 16), Load(8, 128, 20), 4, (1, 2), (32, 64), True
)


class Rig:
    """What the cases share. Models are made and loaded when first asked for; `with` removes what
    was made."""

    def __init__(self, sizes: Sizes, runs: int, peer: bool) -> None:
        self.sizes, self.runs, self.compares = sizes, runs, peer
        self.say: Callable[[str], None] = note
        self._stack = ExitStack()
        self.folder: Callable[[str], Path] = cache(self._folder)
        self.ours: Callable[[str], Ours] = cache(self._ours)
        self.peer: Callable[[str], Peer] = cache(self._peer)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turns(self, contenders: Mapping[str, Callable[[int], float]], runs: int = 0) -> Timing:
        """Measures in turns, as often as was asked for or `runs` times; a quick run takes what it
        gets."""
        return turns(contenders, runs or self.runs, self.say, 0 if self.sizes.small else 3)

    def _folder(self, model: str) -> Path:
        if model == "builtin":
            return BUILTIN
        from lockstep.bench.peers import make_llama

        self.say("making the random llama")
        folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-"))
        )
        make_llama(folder, self.sizes.small)
        return folder

    def _ours(self, model: str) -> Ours:
        self.say("loading the model")
        return Ours(str(self.folder(model)))

    def _peer(self, model: str) -> Peer:
        from lockstep.bench.peers import Peer

        self.say("loading the model into transformers")
        return Peer(self.folder(model))
