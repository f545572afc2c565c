"""Helper threads that share the work of a call, and that no call waits for unless they joined it.

A call is a C function `void f(int64 record, int64 worker)` that claims units of work until none is
left (`claim`). The caller, worker 0, runs it; so do the helpers that it invites, if they are awake.
A helper first marks itself as inside, then checks that the call is still open. The caller waits for
the helpers inside only, so one that the system did not wake in time delays nothing. Several threads
may call concurrently: each call has its own desk, and callers share the helpers. A call gets the
threads that its work is worth, at most torch's number or that of `limited`. Calls recorded by a
tape are replayed as one, a `Script`.

The interpreter's lock (GIL) is released in turns, as the interpreter itself does. Taking it back
while another thread runs Python takes 5 ms, so a thread keeps it over short calls, and releases it
in a call during which its turn would exceed TURN_NS. torch releases it for every tensor and wakes a
waiting thread, mostly for nothing: so threads that run engines queue for their `engine_turn`.
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
# no zero-division checks; not callable from Python
OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

THREAD_NS = 2_000  # of work that justifies one more thread
STREAM_NS = 6_000_000  # a longer call reads more than the caches hold: its units go in order
NEAR_BYTES = 2048  # of a row are prefetched; the hardware prefetches the rest of it
TURN_NS = 4_000_000  # longest turn with the GIL: below the 5 ms after which a waiter demands it
CORES = max(torch.get_num_threads(), (os.cpu_count() or 1) // 2)  # physical ones, as torch counts
PATIENCE_S = 0.02  # longest wait for the engine turn: its owner is late by then, or gone

# A record: these words and, from byte ENTRIES on, the entries that the work reads. TEAM: threads
# that may join. COUNTERS: address of one line per share of the units (SHARES of them), which counts
# the claimed ones. WORDS: length of the record. FAULT: not 0 if the work could not be done.
WORK, UNITS, TEAM, POOL, BOARD, COUNTERS, SHARES, WORDS, FAULT = range(9)
HEAD = 9  # words of a record before its entries
ENTRIES = 8 * HEAD

# The board: int64 words. Words that different threads write are in different 64-byte cache lines.
LINE = 8  # words
LEAVE, ACTIVE, CALLS = 0, LINE, LINE + 1  # helpers are to exit; calls running; calls made so far
DESKS = 8  # calls that can have helpers at the same time
DESK = 2 * LINE  # index of the first desk; each has two lines
CALL, RECORD, TAKEN = 0, 1, LINE  # words of a desk: call number, address of the record, lock
INSIDE = DESK + DESKS * 2 * LINE  # first line of the helpers: number of the call that one is in
MOST_HELPERS = 255
BOARD_LEN = INSIDE + MOST_HELPERS * LINE

# A call's number: a serial number, the index of the first helper invited, and how many are invited.
SERIAL, FIRST, BYTE = 16, 8, 255  # bits below the serial number and the first helper; count's mask
LOOKS = 2000  # polls of the desks without a pause, about 0.1 ms
YIELDS = 16_000  # polls that are each followed by sched_yield, 4 ms if no thread wants the core
SHORT_NAPS, SHORT_US, LONG_US = 200, 50, 2000


# ---- memory and thread primitives of compiled code ----

usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
sched_yield = types.ExternalFunction("sched_yield", types.int32())


@ir_function(types.void(types.int64))
def prefetch(builder: Any, address: Any) -> None:
    """Prefetches the cache line of an address for reading."""
    args = [at(builder, address), I32(0), I32(3), I32(1)]  # to read, near, data
    call_ir(builder, "llvm.prefetch.p0", ir.VoidType(), args)


@ir_function(lambda pointer: types.int64(pointer))
def address(builder: Any, pointer: Any) -> Any:
    """Returns a pointer as an int64 byte address."""
    return builder.ptrtoint(pointer, I64)


def pointer(kind: Any, element: Any) -> Any:
    """Builds `f(address)`, a pointer to elements of `kind`, indexed like an array."""

    @ir_function(types.CPointer(kind)(types.int64))
    def elements(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, element.as_pointer())

    return elements


int32_at, int64_at = pointer(types.int32, I32), pointer(types.int64, I64)
float32_at = pointer(types.float32, F32)
float64_at = pointer(types.float64, ir.DoubleType())


@ir_function(types.int64(types.int64, types.int64))
def fetch_add(builder: Any, place: Any, amount: Any) -> Any:
    """Atomically adds `amount` to the int64 at an address; returns the old value."""
    return builder.atomic_rmw("add", at(builder, place), amount, "seq_cst")


@ir_function(types.int64(types.int64, types.int64))
def exchange(builder: Any, place: Any, value: Any) -> Any:
    """Atomically replaces the int64 at an address by `value`; returns the old value."""
    return builder.atomic_rmw("xchg", at(builder, place), value, "seq_cst")


@ir_function(types.int64(types.int64))
def atomic_load(builder: Any, place: Any) -> Any:
    """Atomically loads the int64 at an address, which other threads change."""
    return builder.load_atomic(at(builder, place), "seq_cst", 8, typ=I64)


@ir_function(integers(3))
def invoke(builder: Any, function: Any, a: Any, b: Any) -> None:
    """Calls the C function of two int64 numbers at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [a, b])


@ir_function(types.void())
def cpu_pause(builder: Any) -> None:
    """Tells the processor that this thread is spinning."""
    if TARGET[0].startswith("x86_64"):
        call_ir(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


# ---- compiled functions ----


def run_records(at: Any, count: Any, pool: Any, board: Any, counters: Any) -> None:
    """Runs `count` consecutive records; stops at a fault and copies it to the first record."""
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
    """Runs a record's work on this thread and helpers: a TEAM, or a fair share of the POOL."""
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
        invoke(work, at, 0)  # alone, it takes all shares
    else:
        first = min(number * share, pool - helpers)  # each desk invites other helpers
        this = (fetch_add(board + 8 * CALLS, 1) + 1) << SERIAL | first << FIRST | helpers
        int64_at(desk)[RECORD] = at
        exchange(desk + 8 * CALL, this)
        invoke(work, at, 0)
        exchange(desk + 8 * CALL, 0)  # closed: no further helper joins
        for helper in range(first, first + helpers):
            looks = 0
            while atomic_load(board + 8 * (INSIDE + LINE * helper)) == this:
                if looks < LOOKS:
                    cpu_pause()
                else:  # the helper has lost its processor: offer it this one
                    sched_yield()
                looks += 1
        exchange(desk + 8 * TAKEN, 0)
    fetch_add(board + 8 * ACTIVE, -1)


@njit(error_model="numpy")
def claim(at: Any, worker: Any) -> Any:
    """Claims a unit, own share (worker, worker + shares, ...) first; returns its number or -1."""
    head = int64_at(at)
    shares, units, counters = head[SHARES], head[UNITS], head[COUNTERS]
    for i in range(shares):
        share = (worker + i) % shares
        counter, size = counters + 8 * LINE * share, (units - share + shares - 1) // shares
        if atomic_load(counter) < size:
            nth = fetch_add(counter, 1)
            if nth < size:
                return nth * shares + share
    return np.int64(-1)


@njit(**OPTIONS)
def prefetch_rows(at: Any, rows: Any, stride: Any, first: Any, last: Any, nbytes: Any) -> None:
    """Prefetches rows that a unit will read: in a team they are in other cores' caches."""
    if int64_at(at)[TEAM] > 1:
        for row in range(first, last):
            for byte in range(0, min(nbytes, NEAR_BYTES), 8 * LINE):
                prefetch(rows + row * stride + byte)


unit: Any = None  # unit(at, nth, worker) computes unit `nth`; `kernel` binds each kernel's own


def units(at: Any, worker: Any) -> None:
    """Runs on each thread of a call: computes units until none is left."""
    nth = claim(at, worker)
    while nth >= 0:
        unit(at, nth, worker)
        nth = claim(at, worker)


def serve(board: Any, index: Any) -> None:
    """Runs helper `index` until LEAVE is set: joins every call that invites it, once. While idle it
    first spins, then polls and yields its processor, then sleeps, longer at last. In all calls of
    one thread it has the same worker number, whose memory is therefore in its own cache."""
    inside = board + 8 * (INSIDE + LINE * index)
    last, idle = np.int64(0), np.int64(0)
    while atomic_load(board + 8 * LEAVE) == 0:
        idle += 1
        for number in range(DESKS):
            desk = board + 8 * (DESK + 2 * LINE * number)
            this = atomic_load(desk + 8 * CALL)
            worker = 1 + index - (this >> FIRST & BYTE)
            if this > last and 1 <= worker <= this & BYTE:
                last, idle = this, np.int64(0)
                exchange(inside, this)
                if atomic_load(desk + 8 * CALL) == this:
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
            cpu_pause()


# ---- Python ----


class Helpers:
    """The helper threads of this process, one fewer than `count`, started when first needed."""

    def __init__(self) -> None:
        self.former: list[object] = []  # old boards, which a helper may still read once
        self.inherited = 0  # torch's threads in the parent, if it was forked with helpers; else 0
        self.reset()

    def reset(self) -> None:
        """Starts over with a new board and no helpers."""
        self.board, self.address = aligned(8 * BOARD_LEN)
        self.threads: list[threading.Thread] = []
        self.starting = threading.Lock()

    def start(self, count: int) -> None:
        """Starts helpers up to `count`, each with its own index. An interrupt loses one at most."""
        serving = compiled().serve
        with self.starting:
            while len(self.threads) < min(count, MOST_HELPERS):
                args = (self.address, len(self.threads))
                helper = threading.Thread(target=serving, args=args, name="lockstep-helper")
                helper.daemon = True
                self.threads.append(helper)
                helper.start()

    def stop(self) -> None:
        """Ends all helpers: compiled code must not run while the interpreter unloads it."""
        ctypes.c_int64.from_address(self.address + 8 * LEAVE).value = 1
        self.former.append(self.board)
        for thread in self.threads:
            with suppress(RuntimeError):  # an interrupt came before it was started
                thread.join()
        self.reset()


def reset_after_fork() -> None:
    """Resets the helpers in a forked process, which has none. OpenMP's threads do not survive the
    fork either, and torch would wait for them, so it continues with one thread."""
    if HELPERS.threads:
        HELPERS.inherited = HELPERS.inherited or torch.get_num_threads()
        torch.set_num_threads(1)
    HELPERS.reset()


class ThreadState(threading.local):
    """State of each calling thread."""

    def __init__(self) -> None:
        self.limit: int | None = None  # most threads of its calls, inside `limited`
        self.tape: Any = None  # the tape that records its calls (run/tape.py)
        self.turn_ns = 0  # time at which it last released the GIL
        self.lines, self.counters = aligned(8 * LINE * (MOST_HELPERS + 1))  # claim counters
        self.memory = aligned(0)  # scratch of its calls' workers


class Call:
    """A repeatable call of a `kernel`: `units` of work on at most `most` threads (see `team`), some
    `ns` long on one thread; `entries` are the words that it reads."""

    def __init__(self, work: Any, entries: Sequence[int], units: int, most: int, ns: int) -> None:
        shares, words = most if ns < STREAM_NS else 1, HEAD + len(entries)
        self.work, self.most, self.each_ns, self.calls = work, most, ns // most, 1
        self.record = array("q", (work.address, units, most, 0, 0, 0, shares, words, 0, *entries))

    def run(self, *places: tuple[int, int]) -> "array[int]":
        """Runs the call. `places`: (index, value) of entries to replace, mostly addresses. Returns
        the record, in which the kernel may have set FAULT."""
        record = self.record[:]
        for number, value in places:
            record[HEAD + number] = value
        if OWN.tape is not None:
            OWN.tape.note(self, record)
        if self.most > len(HELPERS.threads) + 1:
            HELPERS.start(thread_count() - 1)
        at, _ = record.buffer_info()
        numbers = (at, self.calls, len(HELPERS.threads), HELPERS.address, OWN.counters)
        if perf_counter_ns() - OWN.turn_ns + self.each_ns < TURN_NS:
            compiled().call(*numbers)
        else:
            compiled().released(*numbers)
            OWN.turn_ns = perf_counter_ns()
        return record


class Script(Call):
    """Consecutive calls that are replayed as one: their records, concatenated. The owner keeps the
    memory alive that the records point to."""

    def __init__(self) -> None:
        self.record, self.calls, self.most, self.each_ns = array("q"), 0, 1, 0
        self.works: list[Any] = []

    def add(self, call: Call, record: "array[int]") -> None:
        self.record.extend(record)
        self.works.append(call.work)
        self.most, self.each_ns = max(self.most, call.most), self.each_ns + call.each_ns
        self.calls += 1

    def repeat(self) -> None:
        """Replays all calls on what is now in memory. Raises RuleError if one faults."""
        if self.run()[FAULT]:
            rule = "every row index that a replayed launch reads or writes is in range"
            raise RuleError(rule, "one out of range", "Check the plan that it was replayed with")


class TapeMemory:
    """Memory of recorded calls. A block is reused when no tensor refers to it, also by other tapes:
    of the tapes that share a room one runs at a time."""

    def __init__(self) -> None:
        self.memory = aligned(0)  # scratch of workers
        self.free: dict[int, list[tuple[Any, int]]] = defaultdict(list)  # (memory, address) by size
        # all (address, size, memory), sorted; a block that an interrupt has lost is never reused
        self.places: list[tuple[int, int, Any]] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Returns an uninitialised tensor in this memory."""
        wanted = np.dtype(dtype).itemsize * math.prod(shape)
        size = 1 << max(wanted - 1, LINE).bit_length()
        if not self.free[size]:
            memory, at = aligned(size)
            insort(self.places, (at, size, memory))
            self.free[size].append((memory, at))
        block = self.free[size].pop()
        begin = block[1] - address_of(block[0])
        array = block[0][begin : begin + wanted].view(dtype).reshape(shape)
        weakref.finalize(array, self.free[size].append, block).atexit = False
        return torch.from_numpy(array)

    def used(self) -> int:
        """Returns the bytes of all blocks that are not free."""
        free = sum(size * len(blocks) for size, blocks in self.free.items())
        return sum(size for _, size, _ in self.places) - free

    def holds(self, tensor: Any) -> bool:
        """Returns whether `tensor` is a tensor in this memory."""
        at = tensor.data_ptr() if isinstance(tensor, Tensor) else 0
        nth = bisect(self.places, at, key=itemgetter(0))
        return nth > 0 and at < sum(self.places[nth - 1][:2])


def setting() -> tuple[int, int]:
    """Returns what `team` depends on besides its arguments; part of the key of cached calls."""
    return thread_count(), THREAD_NS


def team(units: int, cost_ns: int) -> int:
    """Returns how many threads a call of `units` gets that takes about `cost_ns` on one thread."""
    worth = min(units, cost_ns // THREAD_NS)
    return min(worth, thread_count()) if worth > 1 else 1


def memory(each: int, team: int) -> int:
    """Returns the address, a multiple of 64, of `each` bytes per worker of a team. The memory
    belongs to the calling thread, or to its tape's room, and is reused by the next such call."""
    own: Any = OWN if OWN.tape is None else OWN.tape.room
    if len(own.memory[0]) < each * team + 64:
        own.memory = aligned(each * team)
    if OWN.tape is not None:
        OWN.tape.held.append(own.memory)
    address: int = own.memory[1]
    return address


def aligned(nbytes: int) -> tuple[Any, int]:
    """Returns new zeroed memory and its first 64-byte aligned address, with `nbytes` from there."""
    memory = np.zeros(nbytes + 64, np.uint8)
    return memory, -(-address_of(memory) // 64) * 64


def empty(*shape: int, dtype: Any = np.float32) -> Tensor:
    """Returns an uninitialised tensor, in numpy's memory or in that of the recording tape."""
    if OWN.tape is not None:
        return OWN.tape.room.empty(shape, dtype)  # type: ignore[no-any-return]
    return torch.from_numpy(np.empty(shape, dtype))


def address_of(array: Any) -> int:
    """Returns the byte address of a numpy array or a tensor."""
    return array.data_ptr() if isinstance(array, Tensor) else array.__array_interface__["data"][0]


def thread_count() -> int:
    """Returns the most threads that work on a call of this thread."""
    return OWN.limit or HELPERS.inherited or torch.get_num_threads()


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Runs the block with at most `most` threads for calls of this thread, instead of torch's."""
    before, OWN.limit = OWN.limit, most
    try:
        yield
    finally:
        OWN.limit = before


@contextmanager
def engine_turn() -> Iterator[None]:
    """Runs the block while no other thread runs its own, first come first served, unless there are
    cores for two. It serves speed only: after PATIENCE_S a thread enters anyway, so a ticket lost
    to an interrupt costs one wait."""
    if 2 * thread_count() <= CORES:
        yield
        return
    ticket = threading.Lock()
    try:
        ticket.acquire()
        TICKETS.append(ticket)
        if TICKETS[:1] != [ticket]:
            ticket.acquire(timeout=PATIENCE_S)  # released by the thread that ends its engine turn
            with suppress(ValueError):  # a thread that stopped waiting has removed it
                del TICKETS[: TICKETS.index(ticket)]
        yield
    finally:
        with suppress(ValueError, IndexError, RuntimeError):  # ticket gone; no next; it is awake
            TICKETS.remove(ticket)
            TICKETS[0].release()


def relinked(fn: Any, names: dict[str, Any]) -> FunctionType:
    """Returns a copy of a function that looks up its global names in `names`."""
    return FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)


def jitted(fn: Any, names: dict[str, Any], inlined: bool = False) -> Any:
    """Returns the `relinked` function, compiled when first called."""
    return njit(**OPTIONS, forceinline=inlined)(relinked(fn, names))


def linked(
    names: dict[str, Any], replaced: Mapping[str, Any], inlined: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the global names of a kernel, with each function of `lockstep` in them compiled on
    first call. One in `replaced` looks names up in the kernel first, then in its own module."""
    plain = {name: fn for name, fn in names.items() if isinstance(fn, FunctionType)}
    functions = {name: fn for name, fn in plain.items() if fn.__module__.startswith("lockstep.")}
    unknown = sorted((set(replaced) - set(functions)) | (set(inlined) - set(names)))
    if unknown:
        raise KeyError(f"the kernel has no functions {unknown}; it has {sorted(functions)}")
    found, own = dict(names), {name: {**fn.__globals__} for name, fn in replaced.items()}
    for name, fn in {**functions, **replaced}.items():
        found[name] = jitted(fn, own.get(name, found), name in inlined)
    for each in own.values():
        each.update(found)
    return found


def kernel(name: str, unit: Any, cache: bool = True) -> Any:
    """Compiles a `Call`'s C function from a compiled `unit`. Keep the result: it owns the code."""
    return c_function(name, relinked(units, {**globals(), "unit": unit}), cache)


def c_function(name: str, fn: Callable[..., None], cache: bool = True) -> Any:
    """Compiles `fn`, a function of int64 numbers, to a C function."""
    signature = integers(fn.__code__.co_argcount)
    with cached_here(name) if cache else nullcontext(False) as writable:
        return numba.cfunc(signature, cache=writable, error_model="numpy")(fn)


@functools.cache
def compiled() -> Any:
    """Returns the compiled functions of this file; `released` is `call` that releases the GIL."""
    numbers = [ctypes.c_int64] * 5
    playing = relinked(run_records, {**globals(), "call": jitted(call, globals())})
    calling, serving = c_function("calling", playing), c_function("helping", serve)
    return SimpleNamespace(
        call=ctypes.PYFUNCTYPE(None, *numbers)(calling.address),
        released=ctypes.CFUNCTYPE(None, *numbers)(calling.address),
        serve=ctypes.CFUNCTYPE(None, *numbers[:2])(serving.address),
        functions=(calling, serving),  # keeps their code alive
    )


TICKETS: list[threading.Lock] = []  # tickets; the owner of the first has the engine turn
OWN = ThreadState()
HELPERS = Helpers()
atexit.register(HELPERS.stop)
os.register_at_fork(after_in_child=reset_after_fork)
