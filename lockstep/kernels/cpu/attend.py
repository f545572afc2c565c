"""Paged attention on the CPU: the interface, and how the kernel is put together.

`attend` runs the kernel of this machine; `build` makes one with some of its texts replaced, for the
lab. What is computed, and in which order, stands in unit.py. Called by the CPU backend.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.kernels.cpu import elementary, threads, unit
from lockstep.kernels.cpu.threads import where

PRODUCTS_PER_NS = 8  # of one thread
# called per row or two: their arguments are many
INLINED = ("online_softmax", "online_softmax_rows", "score_rows", "add_values", "group_span")


class Table(NamedTuple):
    """Where keys live and who sees them, int32 arrays. Position p of row t, of request r: list
    entry tail_indptr[t] + p - start[t] of tail_slots if p >= start[t], else in page
    (p - first_pos[r]) // page_size of the request (lockstep/plan/address.py)."""

    page_ids: Any  # [pages of all requests]
    page_indptr: Any  # [B + 1]
    first_pos: Any  # [B] position of the first slot of the first page, a multiple of page_size
    start: Any  # [T] first listed position; above every visible position for a plain row
    tail_indptr: Any  # [T + 1]
    tail_slots: Any  # [listed keys of all rows]
    lo: Any  # [T] the row sees positions lo <= p < hi; nothing if lo >= hi
    hi: Any  # [T]
    # [NB, 3], contiguous, (request, row begin, row end): rows computed together; they cover every
    # row once, and some may be empty
    blocks: Any


class Shape(NamedTuple):
    """Integers of a group."""

    kv_heads: int
    page_size: int  # slots per page
    tile: int  # lockstep.order.tile_len, a multiple of 16
    split: int  # lockstep.order.split_len, a multiple of tile
    code: int  # of the format of k and v (`types.KV_FORMATS`)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What all layers of a group share in a step; the arrays live as long."""

    table: Table
    shape: Shape
    largest: int  # rows of a block, at most

    @functools.cached_property
    def entries(self) -> tuple[int, ...]:
        """Of a call: where the arrays are; last, how many blocks."""
        return (*map(where, self.table), len(self.table.blocks))

    @functools.cached_property
    def keys_seen(self) -> int:
        """By all rows together, about: every request's, by rows per request."""
        requests = max(1, len(self.table.page_indptr) - 1)
        pages = len(self.table.page_ids) * len(self.table.lo) // requests
        return pages * self.shape.page_size


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse2: Tensor, prepared: Prepared, layer: Tensor,
    work: Any = None,
) -> None:  # fmt: skip
    """Attention of T rows over paged keys and values, into `out` and `lse2`, by the kernel `work`
    or that of this machine.

    q      float32 [T, H, Dqk], contiguous. Dqk and Dv are multiples of 8, at most 576.
    k, v   the pool [slots, kv_heads, Dqk and Dv], whose last dimension is contiguous.
    out    float32 [T, H, Dv], contiguous; 0 for a row that sees nothing.
    lse2   float32 [T, H]: log2 of the softmax denominator, sink included, or -inf.
    layer  float32 [3 + H]: pre (0: no soft cap, otherwise a score x becomes tanh(x * pre)), c > 0
           (what a score is multiplied by to be in log2 units), what outputs are multiplied by; then
           every head's sink in log2 units, -inf for none.

    A row's bits depend on its query and its keys. Slots that a block does not see are never read.
    """
    (_, heads, d_qk), d_v, shape = q.shape, out.shape[2], prepared.shape
    units = prepared.entries[-1] * shape.kv_heads
    cost_ns = prepared.keys_seen * heads * (d_qk + d_v) // PRODUCTS_PER_NS
    team = threads.team(units, cost_ns)
    rows = prepared.largest * heads // shape.kv_heads
    each = unit.memory_bytes(d_qk, d_v, shape.tile, rows)
    memory = (threads.memory(each, team), each, prepared.largest)
    tensors = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse2.data_ptr())
    sizes = (layer.data_ptr(), heads, d_qk, d_v, k.itemsize, *shape)
    entries = (*tensors, *prepared.entries, *sizes, *k.stride()[:2], *v.stride()[:2], *memory)
    threads.run(work or default(), entries, units, team, cost_ns)


# ---- putting the kernel together ----


def names() -> dict[str, Any]:
    """What the kernel is made of: plain Python functions, its texts, and what they use."""
    return {**vars(elementary), **vars(unit)}


def compiled(**replaced: Callable[..., Any]) -> Any:
    """The kernel with all its texts, some of them replaced by name."""
    found = threads.linked(names(), replaced, INLINED)
    return threads.c_function("attention", threads.relinked(unit.work, found), not replaced)


default = functools.cache(compiled)  # the kernel of this machine, compiled at the first call


def build(**replaced: Callable[..., Any]) -> Callable[..., None]:
    """An `attend` with some of its texts replaced by name, compiled afresh. A replacement may use
    any other text or operation of the kernel by its name."""
    return functools.partial(attend, work=compiled(**replaced))
