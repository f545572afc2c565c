"""Calls on an engine: which call has the turn, and whether a request's caller still waits. An
exception may strike anywhere, even in a `finally`. So a turn belongs to a function and ends with
it; a request belongs to a `Caller`, a function or generator, and is dropped after that ends."""

import gc
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from lockstep.types import RuleError

PATIENCE_S = 0.01  # between two checks that the head of the queue still exists
GC_PAUSES = list[bool]()  # an entry while we keep the garbage collector off


def executing() -> set[FrameType]:
    """Returns the frames of all functions that have not returned, of every thread."""
    found: set[FrameType] = set()
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            found.add(frame)
            frame = frame.f_back
    return found


@contextmanager
def pause_gc() -> Iterator[None]:
    """Keeps Python's garbage collector off in the block: it may take longer than a step."""
    enabled = gc.isenabled()  # False if another thread turned it off; that one turns it on
    try:
        if enabled:
            GC_PAUSES.append(True)
            gc.disable()
        yield
    finally:
        resume_gc(enabled)


def resume_gc(disabled: bool = False) -> None:
    """Turns the collector on again if `pause_gc` turned it off. If an interrupt or a fork kept
    that call from doing so, the next call does."""
    if disabled or GC_PAUSES:
        gc.enable()
        GC_PAUSES.clear()


class Turn:
    """`with Turn(queue):` runs the block alone among all blocks of that queue, first come first
    served. The queue is a plain list, whose operations are atomic. The turn is over when the block
    is left, or when the function around it has ended, by an interrupt or with its thread."""

    __slots__ = ("frame", "queue", "thread", "wakeup")

    def __init__(self, queue: list["Turn"]) -> None:
        self.queue = queue
        self.thread = threading.get_ident()
        self.frame: FrameType | None = sys._getframe(1)
        self.wakeup: threading.Lock | None = None

    def __enter__(self) -> None:
        self.queue.append(self)
        if self.queue[0] is not self:
            self._wait()

    def __exit__(self, *_: object) -> None:
        self.frame = None
        with suppress(ValueError):
            self.queue.remove(self)
        for head in self.queue[:1]:
            if head.wakeup is not None:
                with suppress(RuntimeError):  # already rung
                    head.wakeup.release()

    def _wait(self) -> None:
        """Waits until it is first in the queue. A missed wakeup costs PATIENCE_S, not the turn."""
        self.wakeup = threading.Lock()
        self.wakeup.acquire()
        while (head := self.queue[0]) is not self:
            if head.frame is None or head.frame not in executing():
                with suppress(ValueError):
                    self.queue.remove(head)
            elif head.thread == self.thread:
                self.queue.remove(self)
                rule = "a thread makes one call on an engine at a time"
                got = "a second one from inside the first: from a signal handler, or a finaliser"
                raise RuleError(rule, got, "Make it when the first has returned")
            else:
                self.wakeup.acquire(timeout=PATIENCE_S)


class Caller:
    """What waits for requests: the function of `frame`, or the generator that it follows."""

    __slots__ = ("__weakref__", "frame", "generator")

    def __init__(self, frame: FrameType | None = None) -> None:
        self.frame = frame
        self.generator: weakref.ref[Generator[Any, None, None]] | None = None

    def follow(self, generator: Generator[Any, None, None]) -> None:
        """Makes it live until the generator has ended."""
        self.generator = weakref.ref(generator)

    def close(self) -> None:
        """Marks it as gone. May be called anywhere, also while a turn is running."""
        self.frame = self.generator = None

    def gone(self, frames: set[FrameType]) -> bool:
        """Whether the function or generator has ended; `frames` are those now executing."""
        frame, generator = self.frame, self.generator
        if frame is not None:
            return frame not in frames
        chunks = generator() if generator is not None else None
        return chunks is None or inspect.getgeneratorstate(chunks) == inspect.GEN_CLOSED


GONE = Caller()  # the caller of aborted requests
os.register_at_fork(after_in_child=resume_gc)
