"""Paged attention on the CPU: the interface, and how the kernel is put together.

`attend` runs the kernel of this machine; `build` makes one with some of its texts replaced, for the
lab. What is computed, and in which order, stands in unit.py. Called by the CPU backend.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lockstep.kernels.cpu import elementary, threads, unit
from lockstep.kernels.cpu.threads import where
from lockstep.types import KV_FORMATS

BLOCK_ROWS = 128  # that hide the staging of a tile and leave queries and accumulators in L2
PRODUCTS_PER_NS = 8  # of one thread
ITEM_BYTES = {known.code: known.nbytes for known in KV_FORMATS.values()}
# called per row or two: their arguments are many
INLINED = ("online_softmax", "online_softmax_rows", "score_rows", "add_values", "group_span")


class Table(NamedTuple):
    """Where keys live, int32 arrays. Position p of row t, of request r: list entry tail_indptr[t] +
    p - start[t] of tail_slots if p >= start[t], else in page (p - first_pos[r]) // page_size of the
    request (lockstep/plan/address.py)."""

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
    code: int = 0  # of the format of k and v (`types.KV_FORMATS`)


class Consts(NamedTuple):
    """float32 constants of a layer."""

    pre: float  # 0: no soft cap; otherwise a score x becomes tanh(x * pre)
    c: float  # > 0: what a score is multiplied by to be in log2 units
    v_scale: float


def block_rows(group_size: int, d_qk: int, d_v: int) -> int:
    """Tokens per block that suit the caches; the bits are the same for every partition."""
    rows = BLOCK_ROWS if max(d_qk, d_v) <= 256 else BLOCK_ROWS // 2
    return max(1, rows // group_size)


class Prepared:
    """What all layers of a group share in a step, as entries of a call; the arrays live as long.

    blocks int32 [NB, 3], contiguous, of (request, row begin, row end): rows computed together, at
    most `largest`; they cover every row once, and some may be empty.
    """

    def __init__(self, table: Table, rows: Rows, blocks: Any, largest: int) -> None:
        self.arrays = (*table, *rows, blocks)
        self.entries = (*map(where, self.arrays), len(blocks))
        self.blocks, self.most = len(blocks), largest
        # that all rows see together, about, in pages: every request's, by rows per request
        requests = max(1, len(table.page_indptr) - 1)
        self.pages_seen = len(table.page_ids) * len(rows.lo) // requests


class Layer(NamedTuple):
    """Constants and sinks of a layer, as entries of a call, and the arrays behind them."""

    entries: tuple[int, ...]
    arrays: tuple[Any, ...]


def layer(consts: Consts, sink2: Any) -> Layer:
    """sink2 float32 [H]: the sink in log2 units, -inf for none."""
    arrays = (sink2, np.array(consts, np.float32))
    return Layer(tuple(map(where, arrays)), arrays)


def attend(
    q: Any, k: Any, v: Any, out: Any, lse2: Any, prepared: Prepared, shape: Shape, of: Layer
) -> None:
    """Attention of T rows over paged keys and values, into `out` and `lse2`: numpy arrays, or
    tensors.

    q      float32 [T, H, Dqk], C-contiguous. Dqk and Dv are multiples of 8, at most 576.
    k, v   the pool's storage in the format of `shape.code`, or integers of the same bits. Element d
           of slot s, kv head h, is s * k_slot + h * k_head + d behind the first one.
    out    float32 [T, H, Dv], C-contiguous; 0 for a row that sees nothing.
    lse2   float32 [T, H]: log2 of the softmax denominator, sink included, or -inf.

    A row's bits depend on its query and its keys. Slots that a block does not see are never read.
    """
    call(default(), q, k, v, out, lse2, prepared, shape, of)


def call(
    work: Any, q: Any, k: Any, v: Any, out: Any, lse2: Any, prepared: Prepared, shape: Shape,
    of: Layer,
) -> None:  # fmt: skip
    """Write the arguments of `attend` into a record and set the threads to work on it."""
    (_, heads, d_qk), d_v, units = q.shape, out.shape[2], prepared.blocks * shape.kv_heads
    products = prepared.pages_seen * shape.page_size * heads * (d_qk + d_v)
    cost_ns = products // PRODUCTS_PER_NS
    team = threads.team(units, cost_ns)
    each = unit.memory_bytes(d_qk, d_v, shape.tile, prepared.most * heads // shape.kv_heads)
    memory = (threads.memory(each, team), each, prepared.most)
    tensors = (where(q), where(k), where(v), where(out), where(lse2))
    sizes = (heads, d_qk, d_v, ITEM_BYTES[shape.code], *shape)
    entries = (*tensors, *prepared.entries, *of.entries, *sizes, *memory)
    threads.run(work, entries, units, team, cost_ns)


# ---- putting the kernel together ----


def names() -> dict[str, Any]:
    """What the kernel is made of: plain Python functions, its texts, and what they use."""
    return {**vars(elementary), **vars(unit)}


def compiled(replaced: dict[str, Any], cache: bool) -> Any:
    """The kernel with all its texts."""
    found = threads.linked(names(), replaced, INLINED)
    return threads.c_function("attention", threads.relinked(unit.work, found), cache)


@functools.cache
def default() -> Any:
    """The kernel of this machine, compiled at the first call if the cache does not have it."""
    return compiled({}, cache=True)


def build(**replaced: Callable[..., Any]) -> Callable[..., None]:
    """An `attend` with some of its texts replaced by name, compiled afresh. A replacement may use
    any other text or operation of the kernel by its name."""
    return functools.partial(call, compiled(replaced, cache=False))
