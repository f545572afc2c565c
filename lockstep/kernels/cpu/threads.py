"""Threads that help with a call, and that nobody waits for if they do not come.

A call is a C function `void f(int64 record)` that takes units of work from a counter in its record
until none is left. The caller runs it itself; helpers that are awake run it too. A helper enters
through a gate: while it is inside the caller waits for it, and a helper that the system did not
wake in time finds the gate closed and has missed nothing. So a busy machine makes a call slower,
never stuck behind a thread that has no processor. Helpers look for work without pause for a moment
after a call and then take naps that grow longer.

As many threads work as torch has (`torch.set_num_threads`). Knows nothing of what is computed.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit
from numba.extending import intrinsic
from torch import Tensor

from lockstep.kernels.cpu.cache import announced, cached_here
from lockstep.kernels.cpu.lanes import I64, at, call_ir, int64_at, invoke, types
from lockstep.kernels.cpu.loops import TARGET

GATE, WORK, RECORD, HELPERS, CALLS, LEAVE = (
    0,
    16,
    17,
    18,
    19,
    20,
)  # entries of the mailbox; the gate has a cache line of its own
MAILBOX = 32
OPEN = 1 << 40  # the gate's value is OPEN, while it is, plus the number of helpers inside
LOOKS = 4000  # glances at the mailbox before the first nap, 0.1 to 0.3 ms
SHORT_NAPS, SHORT_US, LONG_US = 200, 50, 2000


def call(work: Any, helpers: Any, mailbox: Any, record: Any) -> None:
    """Run `work` on this thread and on at most `helpers` others."""
    if helpers == 0:
        invoke(work, record)
        return
    box, gate = int64_at(mailbox), mailbox + 8 * GATE
    box[WORK], box[RECORD], box[HELPERS], box[CALLS] = work, record, helpers, box[CALLS] + 1
    change(gate, OPEN)
    invoke(work, record)
    inside = change(gate, -OPEN)
    while inside & (OPEN - 1):
        breathe()
        inside = change(gate, 0)


def serve(mailbox: Any, index: Any, usleep: Any) -> None:
    """A helper's life: once per call, if it is wanted and the gate is open, work; until told to
    leave."""
    box, gate = int64_at(mailbox), mailbox + 8 * GATE
    served: Any = np.int64(0)
    idle: Any = np.int64(0)
    while look(mailbox + 8 * LEAVE) == 0:
        calls = look(mailbox + 8 * CALLS)
        if calls != served and look(gate) & OPEN:
            idle = 0
            if change(gate, 1) & OPEN:
                served = box[CALLS]
                if index < box[HELPERS]:
                    invoke(box[WORK], box[RECORD])
            change(gate, -1)
        elif idle < LOOKS:
            breathe()
            idle += 1
        else:
            invoke(usleep, SHORT_US if idle < LOOKS + SHORT_NAPS else LONG_US)
            idle += 1


class Helpers:
    """The helpers of this process: started when first needed, one less than there are threads."""

    def __init__(self) -> None:
        self.former: list[object] = []  # mailboxes that a helper may still take a look at
        self.reset()

    def reset(self) -> None:
        """Nobody helps."""
        self.mailbox = np.zeros(MAILBOX + 8, np.int64)
        self.address = (self.mailbox.ctypes.data + 63) // 64 * 64
        self.threads: list[threading.Thread] = []
        self.hiring = threading.Lock()

    def want(self, count: int) -> None:
        """Has `count` helpers ready. No two have one number: memory is laid out for so many. An
        interrupt costs a helper at most."""
        serving, usleep = (
            compiled()[1],
            ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value,
        )
        with self.hiring:
            while len(self.threads) < count:
                args = (self.address, len(self.threads), usleep)
                self.threads.append(
                    threading.Thread(target=serving, args=args, name="lockstep-helper", daemon=True)
                )
                self.threads[-1].start()

    def leave(self) -> None:
        """Sends them home: compiled code must not run when the interpreter takes it away."""
        self.mailbox[(self.address - self.mailbox.ctypes.data) // 8 + LEAVE] = 1
        self.former.append(self.mailbox)
        for thread in self.threads:
            with suppress(RuntimeError):  # an interrupt came before it was started
                thread.join()
        self.reset()


HELP = Helpers()
atexit.register(HELP.leave)
os.register_at_fork(after_in_child=HELP.reset)


def run(work: Any, entries: Sequence[int], units: int) -> None:
    """One call of the compiled `work`, on at most one thread per unit. `entries` are its record,
    whose addresses stay valid meanwhile; two counters, which begin at 0, follow them."""
    helpers = min(units, torch.get_num_threads()) - 1
    if helpers > len(HELP.threads):
        HELP.want(helpers)
    record = array("q", (*entries, 0, 0))
    compiled()[0](work.address, max(helpers, 0), HELP.address, record.buffer_info()[0])


def where(array: Any) -> int:
    """The byte address of a numpy array or a tensor."""
    return array.data_ptr() if isinstance(array, Tensor) else array.__array_interface__["data"][0]


def count() -> int:
    """Threads that work on a call."""
    return torch.get_num_threads()


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Runs the block with `most` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def relinked(text: Any, names: dict[str, Any]) -> FunctionType:
    """The same text, which looks up the names it uses in `names`."""
    return FunctionType(text.__code__, names, text.__name__, text.__defaults__, text.__closure__)


def c_function(name: str, text: Callable[[Any], None], cache: bool = True) -> Any:
    """`text`, a function of a record's address, compiled. It lives as long as the object that comes
    back."""
    with (
        cached_here() as writable,
        announced(f"compiling the CPU {name} kernel, once per machine ..."),
    ):
        return cfunc(types.void(types.int64), cache=cache and writable, error_model="numpy")(text)


@functools.cache
def compiled() -> tuple[Any, Any]:
    """`call` and `serve` for this machine."""
    number = types.int64
    with cached_here() as writable:
        caller = njit(types.void(number, number, number, number), cache=writable)(call)
        return caller, njit(types.void(number, number, number), cache=writable, nogil=True)(serve)


def _change(typingctx: Any, place: Any, amount: Any) -> Any:
    """Add to the int64 at address `place`, atomically; the value after."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.add(
            builder.atomic_rmw("add", at(builder, args[0]), args[1], "seq_cst"), args[1]
        )

    return types.int64(types.int64, types.int64), emit


def _look(typingctx: Any, place: Any) -> Any:
    """The int64 at address `place`, which others change."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(at(builder, args[0]), "seq_cst", 8, typ=I64)

    return types.int64(types.int64), emit


def _breathe(typingctx: Any) -> Any:
    """Tell the processor that this thread is waiting."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if TARGET[0].startswith("x86_64"):
            call_ir(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), emit


change: Any = intrinsic(_change)
look: Any = intrinsic(_look)
breathe: Any = intrinsic(_breathe)
