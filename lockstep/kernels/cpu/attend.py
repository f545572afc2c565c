"""Paged attention on the CPU, in the canonical order. A unit of work is the rows of one block times
the query heads of one kv head; here "row" is a (token, query head) pair of a unit.

Plain Python functions, compiled by `build` and linked by name, so that the lab can replace one by
name. Windows, causality, chunks and speculation reach the kernel as numbers. A row's bits depend on
its own keys only: the rows of a unit decide together which tiles are visited and staged, but a tile
that a row does not see leaves that row's state unchanged. Called by the CPU backend.
"""

from collections import namedtuple
from collections.abc import Callable, Collection
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numba.extending import intrinsic

from lockstep.kernels.cpu import elementary, lanes, loops, threads
from lockstep.kernels.cpu.elementary import exp2, log2, tanh
from lockstep.kernels.cpu.lanes import add, div, fma, load, maximum, mul, select, splat, store, sub
from lockstep.kernels.cpu.loops import FLOAT32, ROWS, VECTOR_BYTES, VECTORS
from lockstep.kernels.cpu.threads import ENTRIES, address, claim, int32_at
from lockstep.order import LANES, LN2
from lockstep.plan.address import listed, paged

types = lanes.types
INF, ZERO, ONE = np.float32(np.inf), np.float32(0.0), np.float32(1.0)
TO_LN = np.float32(LN2)
NOWHERE = np.int64(2**62)  # above every position
# The entries of a call as the backend's `prepared` writes them, followed in the record by those of
# a Scratch. Addresses come first, then sizes; strides of slots and heads are in bytes.
KernelArgs = namedtuple(
    "KernelArgs",
    "q k v out lse page_ids page_indptr first_pos start tail_indptr tail_slots lo hi blocks "
    "block_count kv_heads page_size tile split code layer heads group d_qk d_v k_slot k_head "
    "v_slot v_head memory memory_bytes",
)
LAYER, MEMORY = map(KernelArgs._fields.index, ("layer", "memory"))  # their indices
PRE, C, V_SCALE, SINKS = range(4)  # indices into a layer's constants (the backend's `constants`)
Unit = namedtuple("Unit", "request begin end head")  # tokens [begin, end) and one kv head


class Scratch(NamedTuple):
    """One worker's scratch memory: addresses of float32 areas, then arrays per row or key."""

    q: Any  # [rows][q_stride]
    keys: Any  # [d_qk][tile], the tile's keys, transposed
    v: Any  # [tile][v_stride], the tile's values if they cannot be read in place
    p: Any  # [rows][tile] scores, then probabilities
    acc: Any  # [rows][v_stride] numerator of the current split
    total: Any  # [rows][v_stride] numerator folded over the earlier splits
    zeros: Any  # a key row of zeros
    m: Any  # float32[rows] running maximum of the split, raw score units
    sum: Any  # float32[rows] running sum of the split
    alpha: Any  # float32[rows] this tile's rescale factor of acc and sum
    m2: Any  # float32[rows] maximum folded over the earlier splits, log2 units
    sum2: Any  # float32[rows] sum folded over the earlier splits
    first: Any  # int64[rows] the row sees keys [first, last) of this tile
    last: Any
    k_at: Any  # int64[tile] byte address of each key's row
    v_at: Any
    q_stride: Any  # bytes
    v_stride: Any  # bytes
    p_stride: Any  # bytes


# ---- small functions that the lab replaces ----


def rescale(m: Any, m_new: Any, c: Any) -> Any:
    """Returns the factor of the old state under the new maximum: exactly 1 if it is unchanged."""
    return exp2(mul(sub(m, m_new), c))


def split_begin(position: Any, split: Any) -> Any:
    """Returns the first position of the split that contains `position`."""
    return position // split * split


def load_range(first: Any, last: Any, tile: Any) -> Any:
    """Returns the keys of a tile to read for rows that together see [first, last): only these."""
    return first, last


# ---- one tile ----


def spans(job: Any, scratch: Any, unit: Any, begin: Any, end: Any, position: Any) -> Any:
    """Writes per row of tokens [begin, end) which keys [first, last) of the tile at `position` it
    sees, if any. Returns the smallest range that covers them all."""
    tile, group = job.tile, job.group
    hull_first, hull_last = tile, np.int64(0)
    for token in range(begin, end):
        first = max(np.int64(job.lo[token]) - position, np.int64(0))
        last = min(np.int64(job.hi[token]) - position, tile)
        if first < last:
            hull_first, hull_last = min(hull_first, first), max(hull_last, last)
        row = (token - unit.begin) * group
        for r in range(row, row + group):
            scratch.first[r] = first
            scratch.last[r] = last
    return hull_first, hull_last


def locate(job: Any, scratch: Any, unit: Any, token: Any, position: Any, reach: Any) -> None:
    """Fills k_at and v_at for keys [first, last) = reach: one look-up per page or listed key."""
    k_base, v_base = job.k + unit.head * job.k_head, job.v + unit.head * job.v_head
    begin, end = position + reach[0], position + reach[1]
    # a plain row lists no keys, and its `start` does not apply to the other rows of the unit
    boundary = end
    if job.start[token] < job.hi[token]:
        boundary = min(max(np.int64(job.start[token]), begin), end)
    p, size = begin, job.page_size
    while p < boundary:
        slot = np.int64(paged(job.page_ids, job.page_indptr, job.first_pos, size, unit.request, p))
        stop = min(boundary, p + size - p % size)
        for key in range(p - position, stop - position):
            scratch.k_at[key] = k_base + slot * job.k_slot
            scratch.v_at[key] = v_base + slot * job.v_slot
            slot += 1
        p = stop
    while p < end:
        slot = np.int64(listed(job.tail_slots, job.tail_indptr, job.start, token, p))
        scratch.k_at[p - position] = k_base + slot * job.k_slot
        scratch.v_at[p - position] = v_base + slot * job.v_slot
        p += 1


def stage_keys(job: Any, scratch: Any, reach: Any) -> None:
    """Transposes the tile's keys into scratch, 16 at a time; keys outside of reach become zeros."""
    stride = 4 * job.tile
    first, last = reach[0] // LANES * LANES, (reach[1] + LANES - 1) // LANES * LANES
    for key in range(first, reach[0]):
        scratch.k_at[key] = scratch.zeros
    for key in range(reach[1], last):
        scratch.k_at[key] = scratch.zeros
    for key in range(first, last, LANES):
        table, target = address(scratch.k_at) + 8 * key, scratch.keys + 4 * key
        loops.transposed(job.code, table, job.d_qk, target, stride)


def stage_values(job: Any, scratch: Any, reach: Any) -> None:
    """Copies the tile's value rows into scratch as float32 and sets v_at to the copies."""
    for key in range(reach[0], reach[1]):
        source, target = scratch.v_at[key], scratch.v + key * scratch.v_stride
        loops.widened(job.code, source, job.d_v, target)
        scratch.v_at[key] = target


def online_softmax(job: Any, scratch: Any, row: Any) -> None:
    """Turns a row's scores into probabilities in place and updates its m, sum and alpha. A row that
    sees no key of the tile gets zeros and keeps its state."""
    at, tile = scratch.p + row * scratch.p_stride, job.tile
    first, last = scratch.first[row], scratch.last[row]
    whole, pre, c, m = last - first == tile, job.layer[PRE], job.layer[C], scratch.m[row]
    top = splat(-INF)
    for key in range(0, tile, LANES):
        x = load(at + 4 * key)
        if pre != ZERO:
            x = tanh(mul(x, pre))
        if not whole:
            x = select(lanes.between(key, first, last), x, -INF)
        store(at + 4 * key, x)
        top = maximum(top, x)
    m_new = maximum(m, lanes.fold_max(top))
    base = ZERO if m_new == -INF else m_new  # -inf: the row has seen no key of this split yet
    shift, total = -mul(base, c), splat(ZERO)
    for key in range(0, tile, LANES):
        p = exp2(fma(load(at + 4 * key), c, shift))
        if not whole:
            p = select(lanes.between(key, first, last), p, ZERO)
        store(at + 4 * key, p)
        total = add(total, p)
    alpha = rescale(m, base, c)
    scratch.sum[row] = fma(scratch.sum[row], alpha, lanes.fold_sum(total))
    scratch.m[row], scratch.alpha[row] = m_new, alpha


def width(left: Any) -> Any:
    """Returns the width, in vectors, of the widest micro-kernel that fits into `left` vectors."""
    if left >= 4 and VECTORS >= 4:
        return 4
    return 2 if left >= 2 and VECTORS >= 2 else 1


def score_rows(job: Any, scratch: Any, row: Any, rows: Any) -> None:
    """Writes the scores of up to 4 rows against the staged tile to scratch.p."""
    vector, vectors, stride = 0, job.tile // LANES, 4 * job.tile
    q, s = scratch.q + row * scratch.q_stride, scratch.p + row * scratch.p_stride
    while vector < vectors:
        wide = width(vectors - vector)
        at = VECTOR_BYTES * vector
        loops.scores(
            rows, wide, q, scratch.q_stride, scratch.keys + at, stride, job.d_qk, s + at,
            scratch.p_stride,
        )  # fmt: skip
        vector += wide


def add_values(scratch: Any, row: Any, rows: Any, reach: Any) -> None:
    """Sets acc = acc * alpha + p V over keys [first, last) = reach, for up to 4 rows."""
    column, table, alpha = np.int64(0), address(scratch.v_at), address(scratch.alpha) + 4 * row
    p, acc = scratch.p + row * scratch.p_stride, scratch.acc + row * scratch.v_stride
    while column < scratch.v_stride:
        wide = width((scratch.v_stride - column) // VECTOR_BYTES)
        loops.values(
            rows, wide, p, scratch.p_stride, table, reach[0], reach[1], acc, scratch.v_stride,
            column, alpha,
        )  # fmt: skip
        column += VECTOR_BYTES * wide


def finite(scratch: Any, reach: Any) -> Any:
    """Returns whether the values of keys [first, last) = reach contain no infinity and no NaN."""
    total = splat(ZERO)
    for key in range(reach[0], reach[1]):
        for column in range(0, scratch.v_stride, VECTOR_BYTES):
            total = fma(load(scratch.v_at[key] + column), ZERO, total)
    return lanes.fold_sum(total) == ZERO


def group_span(scratch: Any, row: Any, rows: Any) -> Any:
    """Returns the range of keys that `rows` rows together see, and whether each sees all of it."""
    first, last, same = NOWHERE, np.int64(0), True
    for r in range(row, row + rows):
        alike = scratch.first[r] == scratch.first[row] and scratch.last[r] == scratch.last[row]
        same = same and alike
        if scratch.first[r] < scratch.last[r]:
            first, last = min(first, scratch.first[r]), max(last, scratch.last[r])
    return first, last, same


def tile_of(job: Any, scratch: Any, unit: Any, begin: Any, end: Any, position: Any) -> None:
    """Adds the tile at `position` to the state of the rows of tokens [begin, end) of the unit."""
    first, last = spans(job, scratch, unit, begin, end, position)
    if first >= last:
        return
    reach = load_range(first, last, job.tile)
    locate(job, scratch, unit, begin, position, reach)
    stage_keys(job, scratch, reach)
    row_begin, row_end = (begin - unit.begin) * job.group, (end - unit.begin) * job.group
    in_place = job.code == FLOAT32 and job.d_v % LANES == 0 and row_end - row_begin <= ROWS
    if not in_place:
        stage_values(job, scratch, reach)
    for row in range(row_begin, row_end, ROWS):
        rows = min(row_end - row, ROWS)
        first, last, same = group_span(scratch, row, rows)
        if first < last:
            score_rows(job, scratch, row, rows)
            for r in range(row, row + rows):
                online_softmax(job, scratch, r)
    checked, clean = False, True
    for row in range(row_begin, row_end, ROWS):
        rows = min(row_end - row, ROWS)
        first, last, same = group_span(scratch, row, rows)
        if first < last:
            if not same and not checked:
                checked, clean = True, finite(scratch, reach)
            # 0 * NaN is NaN: if rows see different keys and a value is not finite, each row is
            # computed alone, over its own keys
            together = rows if same or clean else 1
            for r in range(row, row + rows, together):
                first, last, same = group_span(scratch, r, together)
                add_values(scratch, r, together, load_range(first, last, job.tile))


# ---- splits and the whole unit ----


def reset(scratch: Any, rows: Any) -> None:
    """Resets the state of every row for a new split."""
    for row in range(rows):
        scratch.m[row], scratch.sum[row] = -INF, ZERO
        for column in range(0, scratch.v_stride, VECTOR_BYTES):
            store(scratch.acc + row * scratch.v_stride + column, splat(ZERO))


def weights(m: Any, m_other: Any) -> Any:
    """Returns the maximum of two states (log2 units) and the factor of each under it."""
    top = maximum(m, m_other)
    base = ZERO if top == -INF else top
    return top, exp2(sub(m, base)), exp2(sub(m_other, base))


def fold(job: Any, scratch: Any, rows: Any) -> None:
    """Folds the finished split into the total of every row."""
    for row in range(rows):
        top, old, new = weights(scratch.m2[row], mul(scratch.m[row], job.layer[C]))
        scratch.m2[row] = top
        scratch.sum2[row] = fma(scratch.sum2[row], old, mul(scratch.sum[row], new))
        total, acc = scratch.total + row * scratch.v_stride, scratch.acc + row * scratch.v_stride
        for column in range(0, scratch.v_stride, VECTOR_BYTES):
            store(total + column, fma(load(total + column), old, mul(load(acc + column), new)))


def begin_unit(job: Any, scratch: Any, unit: Any) -> Any:
    """Copies queries, clears totals; returns rows, lowest lo, highest hi, first listed position."""
    rows = (unit.end - unit.begin) * job.group
    lo, hi, tail = NOWHERE, np.int64(0), NOWHERE
    for token in range(unit.begin, unit.end):
        if job.lo[token] < job.hi[token]:
            lo, hi = min(lo, np.int64(job.lo[token])), max(hi, np.int64(job.hi[token]))
            if job.start[token] < job.hi[token]:
                tail = min(tail, np.int64(job.start[token]))
        for g in range(job.group):
            row = (token - unit.begin) * job.group + g
            source = job.q + 4 * job.d_qk * (token * job.heads + unit.head * job.group + g)
            loops.widened(FLOAT32, source, job.d_qk, scratch.q + row * scratch.q_stride)
            scratch.m2[row], scratch.sum2[row] = -INF, ZERO
            for column in range(0, scratch.v_stride, VECTOR_BYTES):
                store(scratch.total + row * scratch.v_stride + column, splat(ZERO))
    return rows, lo, hi, tail


def end_row(job: Any, scratch: Any, row: Any, target: Any, head: Any) -> Any:
    """Folds the sink, divides, and writes one output row. Returns log2 of the denominator."""
    top, old, new = weights(scratch.m2[row], job.layer[SINKS + head])
    total = fma(scratch.sum2[row], old, mul(ONE, new))
    seen = total != ZERO
    for column in range(0, job.d_v, LANES):
        x = load(scratch.total + row * scratch.v_stride + 4 * column)
        x = div(fma(x, old, mul(ZERO, new)), total)
        x = lanes.canonical(add(mul(x, job.layer[V_SCALE]), ZERO)) if seen else splat(ZERO)
        if column + LANES <= job.d_v:
            store(target + 4 * column, x)
        else:
            lanes.store_half(target + 4 * column, x)
    return lanes.canonical(np.float32(np.float64(top) + log2(np.float64(total)))) if seen else -INF


def run_unit(job: Any, scratch: Any, unit: Any) -> None:
    """Computes a unit: all tiles its rows see, ascending, split by split; then output and LSE."""
    rows, lo, hi, tail = begin_unit(job, scratch, unit)
    reset(scratch, rows)
    position = lo - lo % job.tile
    current = split_begin(position, job.split)
    while position < hi:
        if split_begin(position, job.split) != current:
            fold(job, scratch, rows)
            reset(scratch, rows)
            current = split_begin(position, job.split)
        if position + job.tile <= tail:
            tile_of(job, scratch, unit, unit.begin, unit.end, position)
        else:
            for token in range(unit.begin, unit.end):
                tile_of(job, scratch, unit, token, token + 1, position)
        position += job.tile
    fold(job, scratch, rows)
    for row in range(rows):
        token, head = unit.begin + row // job.group, unit.head * job.group + row % job.group
        target = job.out + 4 * job.d_v * (token * job.heads + head)
        job.lse[token * job.heads + head] = mul(end_row(job, scratch, row, target, head), TO_LN)


# ---- a call ----

INT32S, FLOAT32S, INT64S = map(types.CPointer, (types.int32, types.float32, types.int64))
ARRAYS = {  # types of the fields that are indexed; all others are int64
    **dict.fromkeys(KernelArgs._fields[5:13], INT32S),
    **dict.fromkeys(("lse", "layer", "m", "sum", "alpha", "m2", "sum2"), FLOAT32S),
    **dict.fromkeys(("first", "last", "k_at", "v_at"), INT64S),
}


def fields(kind: Any, areas: Collection[str] = ()) -> Any:
    """Builds `f(entries, memory)`: reads a `kind` at an address; `areas` are offsets of memory."""
    kinds = [ARRAYS.get(name, types.int64) for name in kind._fields]

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        (entries, memory), values = args, []
        for nth, (name, of) in enumerate(zip(kind._fields, kinds, strict=True)):
            value = lanes.load_ir(builder, entries, 8 * nth, of=lanes.I64, align=8)
            if name in areas:
                value = builder.add(value, memory)
            if name in ARRAYS:
                value = builder.inttoptr(value, context.get_value_type(of))
            values.append(value)
        return context.make_tuple(builder, sig.return_type, values)

    def typed(typingctx: Any, entries: Any, memory: Any) -> Any:
        return types.NamedTuple(kinds, kind)(entries, memory), emit

    return intrinsic(typed)


unpack, carve = fields(KernelArgs), fields(Scratch, Scratch._fields[:-3])
SCRATCH = ENTRIES + 8 * len(KernelArgs._fields)  # byte of a record where Scratch's entries begin


@lru_cache(64)
def layout(d_qk: int, d_v: int, tile: int, rows: int) -> tuple[int, ...]:
    """Returns a Scratch's entries (areas as byte offsets), then its bytes, a multiple of 64."""
    q, v, row = (4 * LANES * -(-n // LANES) for n in (d_qk, d_v, rows))
    areas = (rows * q, 4 * d_qk * tile, tile * v, 4 * rows * tile, rows * v, rows * v, q)
    tables = (*[row] * 5, *[8 * rows] * 2, *[8 * tile] * 2)
    *begins, end = accumulate((*areas, *tables), initial=0)
    return (*begins, q, v, 4 * tile, -(-end // 64) * 64)


def work(at: Any, worker: Any) -> None:
    """Runs on each thread of a call: claims units until none is left. Last blocks go first: under
    causality they see the most keys."""
    job = unpack(at + ENTRIES, 0)
    scratch = carve(at + SCRATCH, job.memory + worker * job.memory_bytes)
    for byte in range(0, scratch.q_stride, VECTOR_BYTES):
        store(scratch.zeros + byte, splat(ZERO))
    nth = claim(at, worker)
    while nth >= 0:
        block = int32_at(job.blocks + 12 * (job.block_count - 1 - nth // job.kv_heads))
        request, begin, end = np.int64(block[0]), np.int64(block[1]), np.int64(block[2])
        run_unit(job, scratch, Unit(request, begin, end, nth % job.kv_heads))
        nth = claim(at, worker)


# ---- putting the kernel together ----

# called for every row or few rows, with many arguments
INLINED = ("online_softmax", "score_rows", "add_values", "group_span")


def build(**replaced: Callable[..., Any]) -> Any:
    """Compiles the kernel, with `replaced` functions put in by name (then nothing is cached). A
    replacement may use any function or operation of the kernel by its name."""
    found = threads.linked({**vars(elementary), **globals()}, replaced, INLINED)
    return threads.c_function("attention", threads.relinked(work, found), cache=not replaced)


compiled = cache(build)  # the kernel, compiled once per process
