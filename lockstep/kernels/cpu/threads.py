"""Threads that help with a call, and that nobody waits for if they do not come.

A call is a C function `void f(int64 record, int64 worker)` that claims units of work until none is
left (`claim`). The caller, worker 0, runs it itself; helpers that it invites and that are awake run
it too. A helper says that it is inside and looks whether the call is still open: the caller waits
for those inside, and one that the system did not wake in time has missed nothing. Several threads
may call at once: each call has a desk of its own, and callers share the helpers. A call gets as
many threads as its work is worth, at most as many as torch has or as `limited` says. Calls that a
tape has noted run again as one, a `Script`.

The interpreter's lock is released in turns, as the interpreter itself does it: who takes it back
beside a thread that runs Python waits for 5 ms, so a thread keeps it over short calls, and releases
it in a call during which its turn would last longer than TURN_NS. torch releases it with every
tensor and wakes whoever waits, mostly in vain: threads that run engines wait for the `floor`.
"""

import atexit
import ctypes
import functools
import math
import os
import threading
import weakref
from array import array
from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from operator import itemgetter
from time import perf_counter_ns
from types import FunctionType, SimpleNamespace
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from lockstep.kernels.cpu.cache import cached_here
from lockstep.kernels.cpu.lanes import F32, I32, I64, at, call_ir, integers, ir_function, types
from lockstep.kernels.cpu.loops import TARGET
from lockstep.types import RuleError

njit: Any = numba.njit
# no zero-division checks, not for Python
OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

THREAD_NS = 2_000  # of work that are worth one more thread
STREAM_NS = 6_000_000  # a longer call reads more than the caches hold: its units go in order
NEAR_BYTES = 2048  # of a row that are asked for ahead; the processor itself sees what follows
TURN_NS = 4_000_000  # a thread keeps the interpreter's lock so long: less than those who wait do
CORES = max(torch.get_num_threads(), (os.cpu_count() or 1) // 2)  # as torch counts them
PATIENCE_S = 0.02  # for the floor: who keeps it for longer is late, or gone

# A record: these words, and from byte ENTRIES on what the work reads. TEAM threads may come; at
# COUNTERS each of the SHARES of the units has a line, which counts those that are claimed. It has
# WORDS in all, and a FAULT where it cannot be done.
WORK, UNITS, TEAM, POOL, BOARD, COUNTERS, SHARES, WORDS, FAULT = range(9)
HEAD = 9  # words of a record before its entries
ENTRIES = 8 * HEAD

# The board: int64 words. What different threads write lies in different lines of 64 bytes.
LINE = 8  # words
LEAVE, ACTIVE, CALLS = 0, LINE, LINE + 1  # whether to leave; calls under way, and so far
DESKS = 8  # calls that can have helpers at once
DESK = 2 * LINE  # where the desks begin; each has two lines
CALL, RECORD, TAKEN = 0, 1, LINE  # words of a desk
INSIDE = DESK + DESKS * 2 * LINE  # where the helpers' lines begin: the call that one is inside of
MOST_HELPERS = 255
BOARD_LEN = INSIDE + MOST_HELPERS * LINE

# A call's number names it and says whom it invites: helpers FIRST, FIRST + 1, ..., so many.
SERIAL, FIRST, BYTE = 16, 8, 255  # bits below the serial number, and below the first helper's
LOOKS = 2000  # glances at the desks without pause, about 0.1 ms
YIELDS = 16_000  # glances after which whoever waits for this processor has it, 4 ms if nobody does
SHORT_NAPS, SHORT_US, LONG_US = 200, 50, 2000


# ---- what compiled code does with memory, and with threads ----

usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
sched_yield = types.ExternalFunction("sched_yield", types.int32())


@ir_function(types.void(types.int64))
def prefetch(builder: Any, address: Any) -> None:
    """The line of an address will be read soon."""
    args = [at(builder, address), I32(0), I32(3), I32(1)]  # to read, near, data
    call_ir(builder, "llvm.prefetch.p0", ir.VoidType(), args)


@ir_function(lambda pointer: types.int64(pointer))
def address(builder: Any, pointer: Any) -> Any:
    """The byte address that a pointer holds."""
    return builder.ptrtoint(pointer, I64)


def pointer(kind: Any, element: Any) -> Any:
    """Build `f(address)`: elements of `kind` from there on, indexed like an array."""

    @ir_function(types.CPointer(kind)(types.int64))
    def elements(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, element.as_pointer())

    return elements


int32_at, int64_at = pointer(types.int32, I32), pointer(types.int64, I64)
float32_at = pointer(types.float32, F32)
float64_at = pointer(types.float64, ir.DoubleType())


@ir_function(types.int64(types.int64, types.int64))
def fetch_add(builder: Any, place: Any, amount: Any) -> Any:
    """The int64 at an address, to which `amount` is added."""
    return builder.atomic_rmw("add", at(builder, place), amount, "seq_cst")


@ir_function(types.int64(types.int64, types.int64))
def exchange(builder: Any, place: Any, value: Any) -> Any:
    """The int64 at an address, which becomes `value`."""
    return builder.atomic_rmw("xchg", at(builder, place), value, "seq_cst")


@ir_function(types.int64(types.int64))
def look(builder: Any, place: Any) -> Any:
    """The int64 at an address, which others change."""
    return builder.load_atomic(at(builder, place), "seq_cst", 8, typ=I64)


@ir_function(integers(3))
def invoke(builder: Any, function: Any, a: Any, b: Any) -> None:
    """Call the C function at an address, of two int64 numbers."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [a, b])


@ir_function(types.void())
def breathe(builder: Any) -> None:
    """Tell the processor that this thread is waiting."""
    if TARGET[0].startswith("x86_64"):
        call_ir(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


# ---- texts ----


def play(at: Any, count: Any, pool: Any, board: Any, counters: Any) -> None:
    """Run `count` records, one behind another, up to one with a fault, which the first then has."""
    first = int64_at(at)
    for _ in range(count):
        head = int64_at(at)
        head[POOL], head[BOARD], head[COUNTERS] = pool, board, counters
        call(at)
        if head[FAULT] != 0:
            first[FAULT] = head[FAULT]
            return
        at += 8 * head[WORDS]


def call(at: Any) -> None:
    """Run the record's work on this thread and on helpers: a TEAM, or a fair share, of the POOL."""
    head = int64_at(at)
    work, pool, board, counters = head[WORK], head[POOL], head[BOARD], int64_at(head[COUNTERS])
    if head[TEAM] == 1:
        counters[0] = 0
        invoke(work, at, 0)
        return
    share = (pool + 1) // (fetch_add(board + 8 * ACTIVE, 1) + 1)
    helpers = max(min(head[TEAM], share) - 1, np.int64(0))
    head[TEAM] = helpers + 1
    head[SHARES] = min(head[SHARES], head[TEAM])
    for each in range(head[SHARES]):
        counters[LINE * each] = 0
    number, desk = np.int64(0), board + 8 * DESK
    while number < DESKS and helpers > 0 and exchange(desk + 8 * TAKEN, 1) != 0:
        number += 1
        desk += 16 * LINE
    if number == DESKS or helpers == 0:
        invoke(work, at, 0)  # and all shares are its own
    else:
        first = min(number * share, pool - helpers)  # other desks invite other helpers
        this = (fetch_add(board + 8 * CALLS, 1) + 1) << SERIAL | first << FIRST | helpers
        int64_at(desk)[RECORD] = at
        exchange(desk + 8 * CALL, this)
        invoke(work, at, 0)
        exchange(desk + 8 * CALL, 0)  # from here on nobody comes in
        for helper in range(first, first + helpers):
            looks = 0
            while look(board + 8 * (INSIDE + LINE * helper)) == this:
                if looks < LOOKS:
                    breathe()
                else:  # the helper has lost its processor: it may have this one
                    sched_yield()
                looks += 1
        exchange(desk + 8 * TAKEN, 0)
    fetch_add(board + 8 * ACTIVE, -1)


@njit(error_model="numpy")
def claim(at: Any, worker: Any) -> Any:
    """The next unit that a worker does, or -1: of n shares worker w's is w, w + n, w + 2 n, ..."""
    head = int64_at(at)
    shares, units, counters = head[SHARES], head[UNITS], head[COUNTERS]
    for i in range(shares):
        whose = (worker + i) % shares
        counter, share = counters + 8 * LINE * whose, (units - whose + shares - 1) // shares
        if look(counter) < share:
            nth = fetch_add(counter, 1)
            if nth < share:
                return nth * shares + whose
    return np.int64(-1)


@njit(**OPTIONS)
def fetch(at: Any, rows: Any, stride: Any, first: Any, last: Any, nbytes: Any) -> None:
    """Ask for rows that a unit will read: with several threads they lie in others' caches."""
    if int64_at(at)[TEAM] > 1:
        for row in range(first, last):
            for byte in range(0, min(nbytes, NEAR_BYTES), 8 * LINE):
                prefetch(rows + row * stride + byte)


unit: Any = None  # (at, nth, worker): the n-th unit of a call, of each kernel its own


def units(at: Any, worker: Any) -> None:
    """What a thread does in a call: units of a kernel until none is left."""
    nth = claim(at, worker)
    while nth >= 0:
        unit(at, nth, worker)
        nth = claim(at, worker)


def serve(board: Any, index: Any) -> None:
    """What a helper does, until it shall leave: answers every invitation once. Without any it looks
    for them without pause for a moment, then as long as nobody else wants its processor, and then
    takes naps that grow longer. Its worker's number is the same in the next call of that thread:
    what it left in that worker's memory is in its own cache."""
    inside = board + 8 * (INSIDE + LINE * index)
    last, idle = np.int64(0), np.int64(0)
    while look(board + 8 * LEAVE) == 0:
        idle += 1
        for number in range(DESKS):
            desk = board + 8 * (DESK + 2 * LINE * number)
            this = look(desk + 8 * CALL)
            worker = 1 + index - (this >> FIRST & BYTE)
            if this > last and 1 <= worker <= this & BYTE:
                last, idle = this, np.int64(0)
                exchange(inside, this)
                if look(desk + 8 * CALL) == this:
                    record = int64_at(desk)[RECORD]
                    invoke(int64_at(record)[WORK], record, worker)
                exchange(inside, 0)
        if idle > LOOKS + YIELDS + SHORT_NAPS:
            usleep(LONG_US)
        elif idle > LOOKS + YIELDS:
            usleep(SHORT_US)
        elif idle > LOOKS:
            sched_yield()
        elif idle:
            breathe()


# ---- Python ----


class Helpers:
    """The helpers of this process: started when first needed, one less than there are threads."""

    def __init__(self) -> None:
        self.former: list[object] = []  # boards that a helper may still take a look at
        self.inherited = 0  # threads of the process that this one is a fork of, if it had helpers
        self.reset()

    def reset(self) -> None:
        """Nobody helps."""
        self.board, self.address = aligned(8 * BOARD_LEN)
        self.threads: list[threading.Thread] = []
        self.hiring = threading.Lock()

    def want(self, count: int) -> None:
        """Has `count` helpers ready. No two have one number. An interrupt costs one at most."""
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
        ctypes.c_int64.from_address(self.address + 8 * LEAVE).value = 1
        self.former.append(self.board)
        for thread in self.threads:
            with suppress(RuntimeError):  # an interrupt came before it was started
                thread.join()
        self.reset()


def forked() -> None:
    """In a forked process nobody helps yet; OpenMP's threads are gone for good, and torch, which
    would wait for them, goes on with one."""
    if HELP.threads:
        HELP.inherited = HELP.inherited or torch.get_num_threads()
        torch.set_num_threads(1)
    HELP.reset()


class Own(threading.local):
    """What every calling thread has of its own."""

    def __init__(self) -> None:
        self.limit: int | None = None  # of its threads, while `limited`
        self.tape: Any = None  # that notes its calls (run/tape.py)
        self.turn_ns = 0  # when it released the interpreter's lock the last time
        self.lines, self.counters = aligned(8 * LINE * (MOST_HELPERS + 1))  # of its calls
        self.memory = aligned(0)  # of its workers


class Call:
    """A call of a `kernel`, of so many units, on at most `most` threads, a `team`; `cost_ns` is
    about what it takes on one. `entries` are what it reads. It may be run again and again."""

    def __init__(
        self, work: Any, entries: Sequence[int], units: int, most: int, cost_ns: int
    ) -> None:
        shares, words = most if cost_ns < STREAM_NS else 1, HEAD + len(entries)
        self.work, self.most, self.each_ns, self.calls = work, most, cost_ns // most, 1
        self.record = array("q", (work.address, units, most, 0, 0, 0, shares, words, 0, *entries))

    def run(self, *places: tuple[int, int]) -> "array[int]":
        """Once. `places`: entries that are others this time, addresses, by their number. Returns
        the record, in which the kernel may have left a fault."""
        record = self.record[:]
        for number, value in places:
            record[HEAD + number] = value
        if OWN.tape is not None:
            OWN.tape.note(self, record)
        if self.most > len(HELP.threads) + 1:
            HELP.want(count() - 1)
        at, _ = record.buffer_info()
        numbers = (at, self.calls, len(HELP.threads), HELP.address, OWN.counters)
        if perf_counter_ns() - OWN.turn_ns + self.each_ns < TURN_NS:
            compiled().call(*numbers)
        else:
            compiled().released(*numbers)
            OWN.turn_ns = perf_counter_ns()
        return record


class Script(Call):
    """Calls that have run one behind the other, to be run again as one: their records are. Who
    makes it holds what these point to."""

    def __init__(self) -> None:
        self.record, self.calls, self.most, self.each_ns = array("q"), 0, 1, 0
        self.works: list[Any] = []

    def add(self, call: Call, record: "array[int]") -> None:
        self.record.extend(record)
        self.works.append(call.work)
        self.most, self.each_ns = max(self.most, call.most), self.each_ns + call.each_ns
        self.calls += 1

    def repeat(self) -> None:
        """All of it, by the numbers that are in memory now."""
        if self.run()[FAULT]:
            rule, got = "rows that are read or written are there", "one that is not"
            raise RuleError(rule, got, "Check the plan: a launch was replayed with it")


class Room:
    """Memory that recorded calls work in. It is given out again when nobody holds it, to other
    tapes too: of those that share it one runs at a time."""

    def __init__(self) -> None:
        self.memory = aligned(0)  # of workers
        self.free: dict[int, list[tuple[Any, int]]] = defaultdict(list)  # by size
        # all by address, with their sizes: one that an interrupt has lost is not given to others
        self.places: list[tuple[int, int, Any]] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """A new tensor."""
        wanted = np.dtype(dtype).itemsize * math.prod(shape)
        size = 1 << max(wanted - 1, LINE).bit_length()
        if not self.free[size]:
            memory, at = aligned(size)
            insort(self.places, (at, size, memory))
            self.free[size].append((memory, at))
        block = self.free[size].pop()
        begin = block[1] - where(block[0])
        array = block[0][begin : begin + wanted].view(dtype).reshape(shape)
        weakref.finalize(array, self.free[size].append, block).atexit = False
        return torch.from_numpy(array)

    def used(self) -> int:
        """Bytes that somebody holds."""
        free = sum(size * len(blocks) for size, blocks in self.free.items())
        return sum(size for _, size, _ in self.places) - free

    def holds(self, tensor: Any) -> bool:
        """Whether that is a tensor in this memory."""
        at = tensor.data_ptr() if isinstance(tensor, Tensor) else 0
        nth = bisect(self.places, at, key=itemgetter(0))
        return nth > 0 and at < sum(self.places[nth - 1][:2])


def setting() -> tuple[int, int]:
    """What `team` depends on besides its arguments: a call that is kept is kept for this."""
    return count(), THREAD_NS


def team(units: int, cost_ns: int) -> int:
    """Threads for a call of so many units that takes `cost_ns`, about, on one thread."""
    worth = min(units, cost_ns // THREAD_NS)
    return min(worth, count()) if worth > 1 else 1


def memory(each: int, team: int) -> int:
    """The address of `each` bytes, a multiple of 64, for every worker of a call: the calling
    thread's own until it asks again."""
    own: Any = OWN if OWN.tape is None else OWN.tape.room
    if len(own.memory[0]) < each * team + 64:
        own.memory = aligned(each * team)
    if OWN.tape is not None:
        OWN.tape.held.append(own.memory)
    address: int = own.memory[1]
    return address


def aligned(nbytes: int) -> tuple[Any, int]:
    """New memory, all zero, and its first multiple of 64 as an address, with `nbytes` behind it."""
    memory = np.zeros(nbytes + 64, np.uint8)
    return memory, -(-where(memory) // 64) * 64


def empty(*shape: int, dtype: Any = np.float32) -> Tensor:
    """A new tensor, in memory of numpy's."""
    if OWN.tape is not None:
        return OWN.tape.room.empty(shape, dtype)  # type: ignore[no-any-return]
    return torch.from_numpy(np.empty(shape, dtype))


def where(array: Any) -> int:
    """The byte address of a numpy array or a tensor."""
    return array.data_ptr() if isinstance(array, Tensor) else array.__array_interface__["data"][0]


def count() -> int:
    """Threads that work on a call of this thread, at most."""
    return OWN.limit or HELP.inherited or torch.get_num_threads()


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Runs the block with `most` threads for calls of this thread, however many torch has."""
    before, OWN.limit = OWN.limit, most
    try:
        yield
    finally:
        OWN.limit = before


@contextmanager
def floor() -> Iterator[None]:
    """Runs the block alone among those of other threads, first come first served, unless there are
    processors for two. It is faster so and nothing else: who has waited for long goes on, also
    after an interrupt has lost a ticket."""
    if 2 * count() <= CORES:
        yield
        return
    ticket = threading.Lock()
    try:
        ticket.acquire()
        FLOOR.append(ticket)
        if FLOOR[:1] != [ticket]:
            ticket.acquire(timeout=PATIENCE_S)  # until whoever leaves releases it
            with suppress(ValueError):  # somebody who went on has removed it
                del FLOOR[: FLOOR.index(ticket)]
        yield
    finally:
        with suppress(ValueError, IndexError, RuntimeError):  # lost; nobody waits, or still does
            FLOOR.remove(ticket)
            FLOOR[0].release()


def relinked(text: Any, names: dict[str, Any]) -> FunctionType:
    """The same text, which looks up the names it uses in `names`."""
    return FunctionType(text.__code__, names, text.__name__, text.__defaults__, text.__closure__)


def jitted(text: Any, names: dict[str, Any], inlined: bool = False) -> Any:
    """The same, to be compiled when first called."""
    return njit(**OPTIONS, forceinline=inlined)(relinked(text, names))


def linked(
    names: dict[str, Any], replaced: Mapping[str, Any], inlined: Collection[str] = ()
) -> dict[str, Any]:
    """The names of a kernel: its texts, plain functions of ours, each to be compiled when first
    called, and what they use. One in `replaced` finds the others, then those of its own module."""
    plain = {name: text for name, text in names.items() if isinstance(text, FunctionType)}
    texts = {name: text for name, text in plain.items() if text.__module__.startswith("lockstep.")}
    unknown = sorted(set(replaced) - set(texts))
    if unknown:
        raise KeyError(f"no such text in the kernel: {unknown}; there are {sorted(texts)}")
    found, own = dict(names), {name: {**text.__globals__} for name, text in replaced.items()}
    for name, text in {**texts, **replaced}.items():
        found[name] = jitted(text, own.get(name, found), name in inlined)
    for each in own.values():
        each.update(found)
    return found


def kernel(name: str, unit: Any, cache: bool = True) -> Any:
    """What a `Call` takes: C code that does units by a compiled `unit(at, nth, worker)`. It lives
    as long as the object that comes back."""
    return c_function(name, relinked(units, {**globals(), "unit": unit}), cache)


def c_function(name: str, text: Callable[..., None], cache: bool = True) -> Any:
    """`text`, a function of int64 numbers, compiled."""
    signature = integers(text.__code__.co_argcount)
    with cached_here(name) if cache else nullcontext(False) as writable:
        return numba.cfunc(signature, cache=writable, error_model="numpy")(text)


@functools.cache
def compiled() -> Any:
    """The texts of this file, compiled; `released` is `call` without the interpreter's lock."""
    numbers = [ctypes.c_int64] * 5
    playing = relinked(play, {**globals(), "call": jitted(call, globals())})
    calling, serving = c_function("calling", playing), c_function("helping", serve)
    return SimpleNamespace(
        call=ctypes.PYFUNCTYPE(None, *numbers)(calling.address),
        released=ctypes.CFUNCTYPE(None, *numbers)(calling.address),
        serve=ctypes.CFUNCTYPE(None, *numbers[:2])(serving.address),
        functions=(calling, serving),  # which live as long
    )


FLOOR: list[threading.Lock] = []  # tickets; whose is the first one has the floor
OWN = Own()
HELP = Helpers()
atexit.register(HELP.leave)
os.register_at_fork(after_in_child=forked)
