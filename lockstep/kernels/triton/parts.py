"""Where an item's rows go: to the output, or, as a part of their block, to the scratch, where the
last of the block to arrive folds all parts in ascending order. Plain Triton, which Gluon kernels
compile too (`softmax.py`); for `attend.py` and its warp-specialised twins."""

from collections import namedtuple

import triton
import triton.language as tl

from lockstep.kernels.triton.softmax import beside, finish, fold, index

INTEGERS = (  # arguments whose values make no variants of a kernel
    "heads", "kv_heads", "group", "window", "causal", "work", "state_row", "outside",
    "page_size", "page_mul", "page_shift", "count0", "len0", "count1", "len1", "len2",
    "q_token8", "q_head8", "k_slot8", "k_head8", "v_slot8", "v_head8",
)  # fmt: skip

# the split rule: count0 splits of len0, count1 of len1, then len2 each
Splits = namedtuple("Splits", "count0 len0 count1 len1 len2")
# positions [lo, hi) that each row sees, and [all_lo, all_hi) that all rows of an item see
Seen = namedtuple("Seen", "lo hi all_lo all_hi")
# where the rows of one kv head go, and the scratch for parts
Output = namedtuple("Output", "out lse sinks2 part_ml part_acc counters v_scale heads kv_heads")


@triton.jit
def split_begin(s, splits):
    """Where split s begins, in the unit of the lengths."""
    a = tl.minimum(s, splits.count0)
    b = tl.minimum(tl.maximum(s - splits.count0, 0), splits.count1)
    rest = tl.maximum(s - splits.count0 - splits.count1, 0)
    return a * splits.len0 + b * splits.len1 + rest * splits.len2


@triton.jit
def seen_by(positions, it, group, window, causal, r):
    """What rows r of an item see; nothing past the block's end."""
    f = it.row_begin + r
    last = tl.load(positions + f // group, mask=f < it.row_end, other=-1)
    hi = tl.where(f < it.row_end, tl.where(causal != 0, last + 1, it.hi), 0)
    first_end = tl.load(positions + it.row_begin // group) + 1
    last_end = tl.load(positions + (it.row_end - 1) // group) + 1
    all_lo = tl.maximum(last_end - window, 0)
    all_hi = tl.where(causal != 0, first_end, it.hi)
    return Seen(tl.maximum(hi - window, 0), hi, all_lo, all_hi)


@triton.jit
def write_rows(to, it, M, L, A, r, D_V: tl.constexpr):
    """Rows r of a block: sink, division, scale, one rounding, store."""
    group = to.heads // to.kv_heads
    f = it.row_begin + r
    head = (tl.program_id(0) % to.kv_heads) * group + f % group
    sink2 = tl.load(to.sinks2 + head, mask=f < it.row_end, other=float("-inf"))
    y, ln = finish(M, L, A, sink2, to.v_scale)
    d = index(A, 1)
    at = (f // group).to(tl.int64) * to.heads + head
    tl.store(to.lse + at, ln, mask=f < it.row_end)
    at = beside(at, A)
    mask = (beside(f, A) < it.row_end)[:, None] & (d < D_V)[None, :]
    tl.store(to.out + at[:, None] * D_V + d[None, :], y.to(to.out.dtype.element_ty), mask=mask)


@triton.jit
def write_part(to, it, m, l, a, r, first):
    """One split's state into the scratch, rows [first, first + rows)."""
    real = it.row_begin + r < it.row_end
    ml = to.part_ml + 2 * (first + r).to(tl.int64)
    tl.store(ml, m, mask=real)
    tl.store(ml + 1, l, mask=real)
    r = index(a, 0)
    at = (first + r).to(tl.int64)[:, None] * a.shape[1] + index(a, 1)[None, :]
    tl.store(to.part_acc + at, a, mask=(it.row_begin + r < it.row_end)[:, None])


@triton.jit
def fold_parts(to, it, part, parts, fresh, D_V: tl.constexpr, DEPTH: tl.constexpr):
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
                ml = to.part_ml + 2 * at
                m = tl.load(ml, mask=real, other=float("-inf"), cache_modifier=".cg")
                l = tl.load(ml + 1, mask=real, other=0.0, cache_modifier=".cg")
                acc = to.part_acc + at[:, None] * zeros.shape[1] + d[None, :]
                a = tl.load(acc, mask=real[:, None], other=0.0, cache_modifier=".cg")
                M, L, A = fold(M, L, A, m, l, a)
        write_rows(to, it, M, L, A, r, D_V)


@triton.jit
def arrive(to, it, m, l, a, r, parts, fresh, D_V: tl.constexpr, DEPTH: tl.constexpr):
    """The state of rows r of one part into the scratch; the last of its block to arrive folds all
    parts."""
    rows = it.row_end - it.row_begin
    kv_head = tl.program_id(0) % to.kv_heads
    part = tl.load(it.row + 7) * to.kv_heads + kv_head * parts * rows
    write_part(to, it, m, l, a, r, part + tl.load(it.row + 8) * rows)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    counter = to.counters + tl.load(it.row + 10) * to.kv_heads + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(counter, 0)  # ready for the next launch
        fold_parts(to, it, part, parts, fresh, D_V, DEPTH)
