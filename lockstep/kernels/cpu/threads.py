"""Threads that help with a call, and that nobody waits for if they do not come.

A call is a C function `void f(int64 record, int64 worker)` that claims units of work until none is
left: those of its own share first, then those of others that are not begun (`claim`). The caller,
worker 0, runs it itself; helpers that it invites and that are awake run it too. A helper enters
through the call's gate: while it is inside the caller waits for it, and a helper that the system
did not wake in time finds the gate closed and has missed nothing. So a busy machine makes a call
slower, never stuck behind a thread that has no processor.

Several threads may call at once: each call has a desk, with a gate of its own, and callers share
the helpers. A call gets as many threads as its work is worth, at most as many as torch has
(`torch.set_num_threads`, which nobody here changes) or as `limited` says for the calling thread.

The interpreter's lock is released in turns, as the interpreter itself does it. Who takes it back
beside a thread that runs Python waits for 5 ms, so a thread keeps it over short calls; a call
during which its turn would last longer than TURN_NS releases it. Then both run about half of the
time, however short or long the calls are. Knows nothing of what is computed.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter_ns
from types import FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic
from torch import Tensor

from lockstep.kernels.cpu.cache import announced, cached_here
from lockstep.kernels.cpu.lanes import I64, address, at, call_ir, int64_at, types
from lockstep.kernels.cpu.loops import TARGET

njit: Any = numba.njit
# no zero-division checks, not for Python
OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

THREAD_NS = 5_000  # of work that are worth one more thread
STREAM_NS = 6_000_000  # a longer call reads more than the caches hold: its units go in order
TURN_NS = 4_000_000  # a thread keeps the interpreter's lock so long: less than those who wait do

# A record: these words, and from byte ENTRIES on what the work reads. TEAM is how many threads may
# come; COUNTERS the address of a line for each share, which counts its claimed units; SHARES how
# many there are: as many as threads come, or one.
WORK, UNITS, TEAM, POOL, BOARD, COUNTERS, SHARES = range(7)
ENTRIES = 64

# The board, which callers and helpers share: int64 words in lines of 64 bytes. What different
# threads write lies in different lines.
LINE = 8  # words
LEAVE, USLEEP, YIELD, ACTIVE = 0, 1, 2, LINE  # ACTIVE: calls under way
DESKS = 8  # calls that can have helpers at once; a helper's invitations are one line
DESK = 2 * LINE  # where the desks begin; each has two lines
GATE, TAKEN, RECORD, FIRST, CALLS = 0, LINE, LINE + 1, LINE + 2, LINE + 3  # words of a desk
INBOX = DESK + DESKS * 2 * LINE  # where the helpers' lines begin: invitations, and those seen
MOST_HELPERS = 255
BOARD_LEN = INBOX + MOST_HELPERS * 2 * LINE

OPEN = 1 << 40  # the gate's value is OPEN, while it is, plus the number of helpers inside
LOOKS = 2000  # glances at the inbox without pause, about 0.1 ms
YIELDS = 4000  # glances after which whoever waits for this processor has it, 1 ms if nobody does
SHORT_NAPS, SHORT_US, LONG_US = 200, 50, 2000


# ---- what compiled code does with memory that threads share ----


def _atomic(operation: str, after: bool) -> Any:
    """An atomic change of the int64 at an address: the value after or before."""

    def typed(typingctx: Any, place: Any, amount: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            before = builder.atomic_rmw(operation, at(builder, args[0]), args[1], "seq_cst")
            return builder.add(before, args[1]) if after else before

        return types.int64(types.int64, types.int64), emit

    return intrinsic(typed)


def _look(typingctx: Any, place: Any) -> Any:
    """The int64 at address `place`, which others change."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(at(builder, args[0]), "seq_cst", 8, typ=I64)

    return types.int64(types.int64), emit


def _put(typingctx: Any, place: Any, value: Any) -> Any:
    """The int64 at address `place`, which others look at, becomes `value`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], I64.as_pointer())
        builder.store_atomic(args[1], place, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _invoke(typingctx: Any, function: Any, a: Any, b: Any) -> Any:
    """Call the C function at address `function`, of two int64 numbers, or of the first alone."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _breathe(typingctx: Any) -> Any:
    """Tell the processor that this thread is waiting."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if TARGET[0].startswith("x86_64"):
            call_ir(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), emit


change: Any = _atomic("add", after=True)
exchange: Any = _atomic("xchg", after=False)
look: Any = intrinsic(_look)
put: Any = intrinsic(_put)
invoke: Any = intrinsic(_invoke)
breathe: Any = intrinsic(_breathe)


# ---- texts ----


def call(at: Any) -> None:
    """Run the record's work on this thread and on helpers, a TEAM of the POOL that there is; when
    others call too, on a fair share of them."""
    head = int64_at(at)
    work, pool, board = head[WORK], head[POOL], head[BOARD]
    if head[TEAM] == 1:
        int64_at(head[COUNTERS])[0] = 0
        invoke(work, at, 0)
        return
    share = (pool + 1) // change(board + 8 * ACTIVE, 1)
    helpers = min(head[TEAM], share) - 1
    head[TEAM] = max(helpers, 0) + 1
    head[SHARES] = min(head[SHARES], head[TEAM])
    for number in range(head[SHARES]):
        int64_at(head[COUNTERS])[LINE * number] = 0
    number, desk = np.int64(0), board + 8 * DESK
    while number < DESKS and helpers > 0 and exchange(desk + 8 * TAKEN, 1) != 0:
        number += 1
        desk += 16 * LINE
    if number == DESKS or helpers <= 0:
        invoke(work, at, 0)  # and all shares are its own
    else:
        words, gate, calls = int64_at(desk), desk + 8 * GATE, int64_at(desk)[CALLS] + 1
        first = number * share % pool  # other desks invite other helpers first
        words[RECORD], words[FIRST], words[CALLS] = at, first, calls
        change(gate, OPEN)
        for i in range(helpers):
            put(board + 8 * (INBOX + 2 * LINE * ((first + i) % pool) + number), calls)
        invoke(work, at, 0)
        inside, looks = change(gate, -OPEN), np.int64(0)
        while inside & (OPEN - 1):
            if looks < LOOKS:
                breathe()
            else:  # the helper has lost its processor: it may have this one
                invoke(int64_at(board)[YIELD], 0, 0)
            looks += 1
            inside = look(gate)
        put(desk + 8 * TAKEN, 0)
    change(board + 8 * ACTIVE, -1)


@njit(error_model="numpy")
def claim(at: Any, worker: Any) -> Any:
    """The next unit that a worker does, or -1: of n shares worker w's is w, w + n, w + 2 n, ..."""
    head = int64_at(at)
    shares, units, counters = head[SHARES], head[UNITS], head[COUNTERS]
    for i in range(shares):
        whose = (worker + i) % shares
        counter, share = counters + 8 * LINE * whose, (units - whose + shares - 1) // shares
        if look(counter) < share:
            nth = change(counter, 1) - 1
            if nth < share:
                return nth * shares + whose
    return np.int64(-1)


def serve(board: Any, index: Any) -> None:
    """What a helper does, until it shall leave: answers every invitation once, if the gate of that
    very call is still open. Without invitations it looks for them without pause for a moment, then
    as long as nobody else wants its processor, and then takes naps that grow longer.

    Its worker's number is one of the call's, and in the next call of the same thread the same: what
    it left in that worker's memory is in its own cache.
    """
    inbox = board + 8 * (INBOX + 2 * LINE * index)
    seen = int64_at(inbox + 8 * LINE)
    idle: Any = np.int64(0)
    while look(board + 8 * LEAVE) == 0:
        idle += 1
        for number in range(DESKS):
            invited = look(inbox + 8 * number)
            if invited != seen[number]:
                seen[number], idle = invited, 0
                desk = int64_at(board + 8 * (DESK + 2 * LINE * number))
                gate = address(desk) + 8 * GATE
                if look(gate) & OPEN:
                    if change(gate, 1) & OPEN and desk[CALLS] == invited:
                        record = int64_at(desk[RECORD])
                        worker = 1 + (index + record[POOL] - desk[FIRST]) % record[POOL]
                        invoke(record[WORK], desk[RECORD], worker)
                    change(gate, -1)
        if idle > LOOKS + YIELDS + SHORT_NAPS:
            invoke(int64_at(board)[USLEEP], LONG_US, 0)
        elif idle > LOOKS + YIELDS:
            invoke(int64_at(board)[USLEEP], SHORT_US, 0)
        elif idle > LOOKS:
            invoke(int64_at(board)[YIELD], 0, 0)
        elif idle:
            breathe()


# ---- Python ----


class Helpers:
    """The helpers of this process: started when first needed, one less than there are threads."""

    def __init__(self) -> None:
        self.former: list[object] = []  # boards that a helper may still take a look at
        self.reset()

    def reset(self) -> None:
        """Nobody helps."""
        self.board = np.zeros(BOARD_LEN + LINE, np.int64)
        self.address = (where(self.board) + 63) // 64 * 64
        self.words = self.board[(self.address - where(self.board)) // 8 :]
        library = ctypes.CDLL(None)
        for word, function in ((USLEEP, library.usleep), (YIELD, library.sched_yield)):
            self.words[word] = ctypes.cast(function, ctypes.c_void_p).value or 0
        self.threads: list[threading.Thread] = []
        self.hiring = threading.Lock()

    def want(self, count: int) -> None:
        """Has `count` helpers ready. No two have one number. An interrupt costs a helper at
        most."""
        serving = compiled().serve
        with self.hiring:
            while len(self.threads) < min(count, MOST_HELPERS):
                args = (self.address, len(self.threads))
                helper = threading.Thread(target=serving, args=args, name="lockstep-helper")
                helper.daemon = True
                self.threads.append(helper)
                helper.start()

    def leave(self) -> None:
        """Ends them: compiled code must not run when the interpreter takes it away."""
        self.words[LEAVE] = 1
        self.former.append(self.board)
        for thread in self.threads:
            with suppress(RuntimeError):  # an interrupt came before it was started
                thread.join()
        self.reset()


class Own(threading.local):
    """What every calling thread has of its own."""

    limit: int | None = None  # of its threads, while `limited`
    turn_ns = 0  # when it released the interpreter's lock the last time
    lines, counters = np.empty(0, np.int64), 0  # of its calls' counters; where they begin
    memory, address = np.empty(0, np.uint8), 0  # of its workers; the first that is a multiple of 64


def run(work: Any, entries: Sequence[int], units: int, most: int, cost_ns: int) -> array[int]:
    """One call of the compiled `work` of so many units, on at most `most` threads: a `team`.
    `cost_ns` is about what it takes on one. `entries` are what it reads, addresses in them stay
    valid meanwhile; returns the record, as it left it."""
    if most > len(HELP.threads) + 1:
        HELP.want(count() - 1)
    if not OWN.counters:
        OWN.lines = np.zeros(LINE * (MOST_HELPERS + 2), np.int64)
        OWN.counters = -(-where(OWN.lines) // 64) * 64
    shares = most if cost_ns < STREAM_NS else 1
    head = (work.address, units, most, len(HELP.threads), HELP.address, OWN.counters, shares, 0)
    record = array("q", (*head, *entries))
    if perf_counter_ns() - OWN.turn_ns + cost_ns // most < TURN_NS:
        compiled().call(record.buffer_info()[0])
    else:
        compiled().released(record.buffer_info()[0])
        OWN.turn_ns = perf_counter_ns()
    return record


def team(units: int, cost_ns: int) -> int:
    """Threads for a call of so many units that takes `cost_ns`, about, on one thread."""
    worth = min(units, cost_ns // THREAD_NS)
    return min(worth, count()) if worth > 1 else 1


def memory(each: int, team: int) -> int:
    """The address of memory for the workers of a call, `each` bytes for every one, a multiple of
    64: the calling thread's own until it asks again, whatever is in it."""
    if len(OWN.memory) < each * team + 64:
        OWN.memory = np.empty(each * team + 64, np.uint8)
        OWN.address = -(-where(OWN.memory) // 64) * 64
    return OWN.address


def empty(*shape: int) -> Tensor:
    """A new float32 tensor. Not torch's own: its operators release the interpreter's lock, however
    short they are, and a third of them beside a thread that runs Python waits for it."""
    return torch.from_numpy(np.empty(shape, np.float32))


def where(array: Any) -> int:
    """The byte address of a numpy array or a tensor."""
    return array.data_ptr() if isinstance(array, Tensor) else array.__array_interface__["data"][0]


def count() -> int:
    """Threads that work on a call of this thread, at most."""
    return OWN.limit or torch.get_num_threads()


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Runs the block with `most` threads for calls of this thread: more or fewer than torch has,
    whose number stays what it is."""
    before, OWN.limit = OWN.limit, most
    try:
        yield
    finally:
        OWN.limit = before


def relinked(text: Any, names: dict[str, Any]) -> FunctionType:
    """The same text, which looks up the names it uses in `names`."""
    return FunctionType(text.__code__, names, text.__name__, text.__defaults__, text.__closure__)


def linked(
    names: dict[str, Any], replaced: Mapping[str, Any], inlined: Collection[str] = ()
) -> dict[str, Any]:
    """The names of a kernel: its texts, plain functions of ours, each to be compiled when first
    called, and what they use. A text in `replaced` finds the others, and then those of its own
    module."""
    plain = {name: text for name, text in names.items() if isinstance(text, FunctionType)}
    texts = {name: text for name, text in plain.items() if text.__module__.startswith("lockstep.")}
    unknown = sorted(set(replaced) - set(texts))
    if unknown:
        raise KeyError(f"no such text in the kernel: {unknown}; there are {sorted(texts)}")
    found, own = dict(names), {name: {**text.__globals__} for name, text in replaced.items()}
    for name, text in {**texts, **replaced}.items():
        again = relinked(text, own.get(name, found))
        found[name] = njit(**OPTIONS, forceinline=name in inlined)(again)
    for each in own.values():
        each.update(found)
    return found


def c_function(name: str, text: Callable[..., None], cache: bool = True) -> Any:
    """`text`, a function of int64 numbers, compiled. It lives as long as the object that comes
    back."""
    signature = types.void(*[types.int64] * text.__code__.co_argcount)
    with (
        cached_here() as writable,
        announced(f"compiling the CPU {name} kernel, once per machine ..."),
    ):
        return numba.cfunc(signature, cache=cache and writable, error_model="numpy")(text)


class Compiled(NamedTuple):
    """The texts of this file for this machine: `released` is `call`, without the interpreter's
    lock; `functions` keeps both alive."""

    call: Any
    released: Any
    serve: Any
    functions: tuple[Any, ...]


@functools.cache
def compiled() -> Compiled:
    """Compiled when first needed, and kept on disk."""
    number = ctypes.c_int64
    calling, serving = c_function("calling", call), c_function("helping", serve)
    return Compiled(
        call=ctypes.PYFUNCTYPE(None, number)(calling.address),
        released=ctypes.CFUNCTYPE(None, number)(calling.address),
        serve=ctypes.CFUNCTYPE(None, number, number)(serving.address),
        functions=(calling, serving),
    )


OWN = Own()
HELP = Helpers()
atexit.register(HELP.leave)
os.register_at_fork(after_in_child=HELP.reset)
