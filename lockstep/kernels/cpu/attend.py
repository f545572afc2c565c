"""Paged attention on the CPU: the interface, and how the kernel is put together.

`attend` runs the kernel of this machine, compiled once and kept on disk; `build` makes one with some of its texts replaced, for the
lab. What is computed, and in which order, stands in unit.py. Called by the CPU backend and by the lab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import get_num_threads, literal_unroll, prange

from lockstep.kernels.cpu import elementary, unit, worker
from lockstep.kernels.cpu.cache import announced, cached_here
from lockstep.kernels.cpu.lanes import address, invoke, types
from lockstep.kernels.cpu.unit import Sizes
from lockstep.kernels.cpu.worker import ALIGN, MEMORY, RECORD, SIZES, memory_bytes, most_tokens

njit: Any = numba.njit
cfunc: Any = numba.cfunc

BLOCK_ROWS = 128  # rows of a unit that hide the staging of a tile and still leave queries and accumulators in the L2 cache
OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # no zero-division checks, not for Python
INLINED = ("soften", "soften_rows", "score_rows", "add_values", "group_span")  # called per row or two: their arguments are many


class Table(NamedTuple):
    """Where keys live, int32 arrays. Position p of row t, of request r: list entry tail_indptr[t] + p - start[t] of tail_slots if
    p >= start[t], else in page (p - first_pos[r]) // page_size of the request (lockstep/plan/address.py)."""

    page_ids: Any  # [pages of all requests]
    page_indptr: Any  # [B + 1]
    first_pos: Any  # [B] position of the first slot of the first page, a multiple of page_size
    start: Any  # [T] first listed position; above every visible position for a plain row
    tail_indptr: Any  # [T + 1]
    tail_slots: Any  # [listed keys of all rows]


class Rows(NamedTuple):
    """What each row sees, int32 [T]: positions lo <= p < hi; nothing if lo >= hi."""

    lo: Any
    hi: Any


class Shape(NamedTuple):
    """Integers of a call. Strides are in elements of k and v."""

    kv_heads: int
    page_size: int  # slots per page
    tile: int  # lockstep.order.tile_len, a multiple of 16
    split: int  # lockstep.order.split_len, a multiple of tile
    k_slot: int
    k_head: int
    v_slot: int
    v_head: int


class Consts(NamedTuple):
    """float32 constants of a layer."""

    pre: float  # 0: no soft cap; otherwise a score x becomes tanh(x * pre)
    c: float  # > 0: what a score is multiplied by to be in log2 units
    v_scale: float


def block_rows(group_size: int, d_qk: int, d_v: int) -> int:
    """Tokens per block that suit the caches: a recommendation; the bits are the same for every partition."""
    rows = BLOCK_ROWS if max(d_qk, d_v) <= 256 else BLOCK_ROWS // 2
    return max(1, rows // group_size)


def attend(
    q: Any, k: Any, v: Any, out: Any, lse2: Any, table: Table, rows: Rows, blocks: Any, shape: Shape, consts: Consts, sink2: Any
) -> None:
    """Attention of T rows over paged keys and values, into `out` and `lse2`.

    q      float32 [T, H, Dqk], C-contiguous. Dqk and Dv are multiples of 8, at most 576.
    k, v   the pool's storage as flat arrays: float32, uint16 (bfloat16 bits) or uint8 (float8 e4m3fn bits). Element d of slot s, kv
           head h, is k[s * k_slot + h * k_head + d]. v may be k's own buffer (a latent row's first Dv columns).
    out    float32 [T, H, Dv], C-contiguous: softmax(scores) V * v_scale; 0 for a row that sees nothing.
    lse2   float32 [T, H]: log2 of the softmax denominator, sink included; -inf for a row that sees nothing and has no sink.
    blocks int32 [NB, 3] of (request, row begin, row end): rows computed together; they cover every row once.
    sink2  float32 [H]: the sink in log2 units, -inf for none.

    Query head h uses kv head h // (H / kv_heads). A row's bits depend on its query and its keys, not on blocks, pages or threads. The
    number of threads is Numba's current one. Slots that a block does not see are never read.
    """
    call(*default(), q, k, v, out, lse2, table, rows, blocks, shape, consts, sink2)


def call(
    launch: Any, work: Any, q: Any, k: Any, v: Any, out: Any, lse2: Any, table: Any, rows: Any, blocks: Any,
    shape: Any, consts: Any, sink2: Any,
) -> None:  # fmt: skip
    """Flatten the arguments of `attend` to those of the compiled entry."""
    heads, d_qk, d_v, k_item, v_item = q.shape[1], q.shape[2], out.shape[2], k.itemsize, v.itemsize
    kv_heads, page_size, tile, split, k_slot, k_head, v_slot, v_head = shape
    sizes = (
        heads, kv_heads, heads // kv_heads, d_qk, d_v, page_size, tile, split, k_item, v_item,
        k_slot * k_item, k_head * k_item, v_slot * v_item, v_head * v_item,
    )  # fmt: skip
    constants = np.array(consts, np.float32)
    bytes_k, bytes_v = k.view(np.uint8), v.view(np.uint8)
    launch(work.address, get_num_threads(), q, bytes_k, bytes_v, out, lse2, *table, *rows, blocks, sink2, constants, sizes)


# ---- putting the kernel together ----


def _launch(
    work: Any, threads: Any, q: Any, k: Any, v: Any, out: Any, lse2: Any, page_ids: Any, page_indptr: Any, first_pos: Any, start: Any,
    tail_indptr: Any, tail_slots: Any, lo: Any, hi: Any, blocks: Any, sink2: Any, consts: Any, sizes: Any,
) -> None:  # fmt: skip
    """The compiled entry: write the call into a record and set Numba's threads to work on it."""
    arrays = (q, k, v, out, lse2, page_ids, page_indptr, first_pos, start, tail_indptr, tail_slots, lo, hi, blocks, sink2, consts)
    record = np.zeros(RECORD, np.int64)
    i = 0
    for array in literal_unroll(arrays):
        record[i], record[i + 1] = address(array), array.size
        i += 2
    for i in range(len(sizes)):
        record[SIZES + i] = sizes[i]
    each = memory_bytes(Sizes(*sizes), most_tokens(blocks.ravel(), blocks.shape[0]) * sizes[2])
    memory = np.empty(threads * each + ALIGN, np.uint8)
    record[MEMORY] = (address(memory) + ALIGN - 1) // ALIGN * ALIGN
    record[MEMORY + 1] = each
    start_workers(work, threads, record, memory)


def start_workers(work: Any, threads: Any, record: Any, memory: Any) -> None:
    """Run the C function `work` on every thread. `memory` is an argument to stay alive: the workers have its address only."""
    for _ in prange(threads):
        invoke(work, address(record))


def texts() -> dict[str, Any]:
    """The plain Python functions that make up the kernel, by name."""
    names: dict[str, Any] = {**vars(elementary), **vars(unit), **vars(worker)}
    builders = ("transposed", "widened")  # of operations: run when unit.py is imported
    return {name: value for name, value in names.items() if isinstance(value, FunctionType) and name not in builders}


def relinked(text: Any, names: dict[str, Any]) -> FunctionType:
    """The same text, which looks up the names it uses in `names`."""
    return FunctionType(text.__code__, names, text.__name__, text.__defaults__, text.__closure__)


def linked(replaced: dict[str, Any]) -> dict[str, Any]:
    """The names of the kernel: its texts, some of them replaced, each to be compiled when first called; and what they use."""
    known = texts()
    unknown = sorted(set(replaced) - set(known))
    if unknown:
        raise KeyError(f"no such text in the kernel: {unknown}; there are {sorted(known)}")
    names = {**vars(elementary), **vars(unit), **vars(worker)}
    seen_by = {name: {**text.__globals__} for name, text in replaced.items()}
    for name, text in {**known, **replaced}.items():
        names[name] = njit(**OPTIONS, forceinline=name in INLINED)(relinked(text, seen_by.get(name, names)))
    for own in seen_by.values():  # a replacement finds the kernel's texts and operations, then those of its own module
        own.update(names)
    return names


def compiled(replaced: dict[str, Any], cache: bool) -> Any:
    """Compile `work` with all its texts to a C function. It lives as long as the object that comes back."""
    return cfunc(types.void(types.int64), cache=cache, error_model="numpy")(relinked(worker.work, linked(replaced)))


def readonly(dtype: Any, ndim: int = 1) -> Any:
    """The Numba type of an input array, which takes writeable arrays too."""
    return types.Array(dtype, ndim, "C", readonly=True)


def signature() -> Any:
    """The one signature of `_launch`. k and v come as bytes: their format is data, so that one compilation serves all."""
    floats, ints, pool = types.float32, types.int32, readonly(types.uint8)
    return types.void(
        types.int64, types.int64, readonly(floats, 3), pool, pool, types.Array(floats, 3, "C"), types.Array(floats, 2, "C"),
        *[readonly(ints)] * 8, readonly(ints, 2), readonly(floats), readonly(floats),
        types.UniTuple(types.int64, len(Sizes._fields)),
    )  # fmt: skip


@functools.cache
def launcher() -> Any:
    """The compiled `_launch`; it has no text that could be replaced, so all kernels share it."""
    with cached_here() as writable:
        names = {**globals(), **linked({}), "start_workers": njit(parallel=True)(start_workers)}
        return njit(signature(), cache=writable)(relinked(_launch, names))


@functools.cache
def default() -> tuple[Any, Any]:
    """The kernel of this machine, compiled at the first call if the cache does not have it."""
    with cached_here() as writable, announced("compiling the CPU attention kernel, once per machine ..."):
        return launcher(), compiled({}, writable)


def build(**replaced: Callable[..., Any]) -> Callable[..., None]:
    """A kernel with the interface of `attend` and some of its texts replaced by name, compiled afresh, not cached.

    A replacement takes the arguments of the text it stands for (paged, listed, rescale, split_begin, load_range, ...) and may use any
    other text or operation of the kernel by its name.
    """
    return functools.partial(call, launcher(), compiled(replaced, cache=False))
