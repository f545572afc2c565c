"""An item of the table: what its rows see, and where they go: to the output, or, as a part of their
block, to the scratch, where the last of the block to arrive folds all parts in ascending order.
Plain Triton, which Gluon kernels compile too (`softmax.py`); for `attend.py` and its twins."""

from collections import namedtuple

import triton
import triton.language as tl

from lockstep.kernels.triton.softmax import beside, finish, fold, index

NUMBERS = (  # arguments whose values make no variants of a kernel
    "heads", "kv_heads", "group", "window", "causal", "work", "count0", "len0", "len1",
    "page_size", "page_mul", "page_shift",
    "q_row8", "q_head8", "k_row8", "k_head8", "v_row8", "v_head8",
)  # fmt: skip

# what every kernel but the prefill takes: queries with their strides, items, what rows see and how
# it is scored, the split rule (count0 splits of len0, then len1 each), where rows go, the scratch
Call = namedtuple(
    "Call",
    "q q_row8 q_head8 items positions page_ids heads kv_heads window causal c v_scale sinks2 "
    "count0 len0 len1 out lse part_ml part_acc counters",
)
# its place in the table, the page entry of position 0, were it there, rows [row_begin, row_end),
# positions [lo, hi) that they see, splits [split, split_end) and tiles [begin, end) of them
Item = namedtuple("Item", "row entry row_begin row_end lo hi split split_end begin end")
# positions [lo, hi) that each row sees, and [all_lo, all_hi) that all rows of an item see
Seen = namedtuple("Seen", "lo hi all_lo all_hi")


@triton.jit
def split_begin(s, call):
    """Where split s begins."""
    first = tl.minimum(s, call.count0)
    return first * call.len0 + (s - first) * call.len1


@triton.jit
def load_item(call, n, TILE: tl.constexpr):
    """The n-th item."""
    row = call.items + n * 12
    row_begin, row_end = tl.load(row + 1), tl.load(row + 2)
    lo, hi = tl.load(row + 3), tl.load(row + 4)
    split, split_end = tl.load(row + 5), tl.load(row + 6)
    begin = tl.maximum(split_begin(split, call), lo) // TILE
    end = tl.minimum(split_begin(split_end, call), hi + TILE - 1) // TILE
    return Item(row, tl.load(row), row_begin, row_end, lo, hi, split, split_end, begin, end)


@triton.jit
def rows_of(call, it, r):
    """Tokens and heads of rows r of an item, and which of them there are."""
    group = call.heads // call.kv_heads
    f = it.row_begin + r
    head = (tl.program_id(0) % call.kv_heads) * group + f % group
    return (f // group).to(tl.int64), head, f < it.row_end


@triton.jit
def seen_by(call, it, r):
    """What rows r of an item see; nothing past the block's end."""
    group = call.heads // call.kv_heads
    f = it.row_begin + r
    last = tl.load(call.positions + f // group, mask=f < it.row_end, other=-1)
    hi = tl.where(f < it.row_end, tl.where(call.causal != 0, last + 1, it.hi), 0)
    first_end = tl.load(call.positions + it.row_begin // group) + 1
    last_end = tl.load(call.positions + (it.row_end - 1) // group) + 1
    all_lo = tl.maximum(last_end - call.window, 0)
    all_hi = tl.where(call.causal != 0, first_end, it.hi)
    return Seen(tl.maximum(hi - call.window, 0), hi, all_lo, all_hi)


@triton.jit
def write_rows(call, it, M, L, A, r, D_V: tl.constexpr):
    """Rows r of a block: sink, division, scale, one rounding, store."""
    token, head, real = rows_of(call, it, r)
    sink2 = tl.load(call.sinks2 + head, mask=real, other=float("-inf"))
    y, ln = finish(M, L, A, sink2, call.v_scale)
    d = index(A, 1)
    at = token * call.heads + head
    tl.store(call.lse + at, ln, mask=real)
    at = beside(at, A)
    mask = (beside(it.row_begin + r, A) < it.row_end)[:, None] & (d < D_V)[None, :]
    tl.store(call.out + at[:, None] * D_V + d[None, :], y.to(call.out.dtype.element_ty), mask=mask)


@triton.jit
def write_part(call, it, m, l, a, r, first):
    """One split's state into the scratch, rows [first, first + rows)."""
    real = it.row_begin + r < it.row_end
    ml = call.part_ml + 2 * (first + r).to(tl.int64)
    tl.store(ml, m, mask=real)
    tl.store(ml + 1, l, mask=real)
    r = index(a, 0)
    at = (first + r).to(tl.int64)[:, None] * a.shape[1] + index(a, 1)[None, :]
    tl.store(call.part_acc + at, a, mask=(it.row_begin + r < it.row_end)[:, None])


@triton.jit
def fold_parts(call, it, part, parts, fresh, D_V: tl.constexpr, DEPTH: tl.constexpr):
    """The parts of a block, folded in ascending order, as many rows at a time as the state `fresh`
    has. DEPTH parts are fetched at a time; one past the end adds nothing."""
    zeros = fresh[2]
    d = index(zeros, 1)
    rows = it.row_end - it.row_begin
    for row in range(0, rows, zeros.shape[0]):
        r = row + index(zeros, 0)
        M, L, A = fresh
        for nth in range(0, parts, DEPTH):
            for i in tl.static_range(DEPTH):
                at = (part + (nth + i) * rows + r).to(tl.int64)
                real = (r < rows) & (nth + i < parts)
                ml = call.part_ml + 2 * at
                m = tl.load(ml, mask=real, other=float("-inf"), cache_modifier=".cg")
                l = tl.load(ml + 1, mask=real, other=0.0, cache_modifier=".cg")
                acc = call.part_acc + at[:, None] * zeros.shape[1] + d[None, :]
                a = tl.load(acc, mask=real[:, None], other=0.0, cache_modifier=".cg")
                M, L, A = fold(M, L, A, m, l, a)
        write_rows(call, it, M, L, A, r, D_V)


@triton.jit
def arrive(call, it, m, l, a, r, parts, fresh, D_V: tl.constexpr, DEPTH: tl.constexpr):
    """The state of rows r of one part into the scratch; the last of its block to arrive folds all
    parts."""
    rows = it.row_end - it.row_begin
    kv_head = tl.program_id(0) % call.kv_heads
    part = tl.load(it.row + 7) * call.kv_heads + kv_head * parts * rows
    write_part(call, it, m, l, a, r, part + tl.load(it.row + 8) * rows)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    counter = call.counters + tl.load(it.row + 10) * call.kv_heads + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(counter, 0)  # ready for the next launch
        fold_parts(call, it, part, parts, fresh, D_V, DEPTH)
