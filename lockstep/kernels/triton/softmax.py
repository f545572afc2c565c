"""The softmax of attention rows on a GPU, shared by all attention kernels, plain Triton and Gluon:
scores to weights, row sum, fold; which keys the rows of an item see; and where their state goes: to
the output or, if a block is split into parts, to scratch, where its last part to arrive folds all.

Each function's bits are independent of the launch shape (`docs/numerics.md`): fma where one
rounding is meant, the rescale from the difference of maxima, row sums whose every level adds
exactly two numbers. Kernels are compiled with `enable_fp_fusion=False`, so a product and a sum that
are written apart stay two roundings. Rows are along axis 0. Gluon kernels compile the same source;
only there tensors have layouts, which are taken from an argument, so that a transposed view is
computed transposed.
"""

from collections import namedtuple

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

LN2 = tl.constexpr(0.6931471805599453)
TWO_LOG2E = tl.constexpr(2.8853900817779268)
NUMBERS = (  # integer arguments whose values Triton does not specialise kernels on
    "heads", "kv_heads", "group", "window", "causal", "work", "count0", "len0", "len1",
    "page_size", "page_mul", "page_shift",
    "q_row8", "q_head8", "k_row8", "k_head8", "v_row8", "v_head8",
)  # fmt: skip

# arguments of every kernel but the prefill: queries and their strides, items, what rows see and how
# scores are scaled, the split rule (count0 splits of len0, then of len1), outputs, scratch
Call = namedtuple(
    "Call",
    "q q_row8 q_head8 items positions page_ids heads kv_heads window causal c v_scale sinks2 "
    "count0 len0 len1 out lse part_ml part_acc counters",
)
# pointer into the table; index in page_ids that position 0 has or would have; flat rows [row_begin,
# row_end); positions [lo, hi) that they see; splits [split, split_end), tiles [begin, end) of these
Item = namedtuple("Item", "row entry row_begin row_end lo hi split split_end begin end")
# positions [lo, hi) that each row sees, and [all_lo, all_hi) that every row of the item sees
Seen = namedtuple("Seen", "lo hi all_lo all_hi")


@triton.jit
def index(like, AXIS: tl.constexpr):
    """Returns the row (AXIS 0) or column (AXIS 1) indices of `like` [R, C], in its layout."""
    if hasattr(like.type, "layout"):
        return gl.arange(0, like.shape[AXIS], layout=gl.SliceLayout(1 - AXIS, like.type.layout))
    else:
        return tl.arange(0, like.shape[AXIS])


@triton.jit
def beside(x, like):
    """Returns x [R] in the layout of the rows of `like` [R, C]."""
    if hasattr(like.type, "layout"):
        x = gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))
    return x


@triton.jit
def spread(x, like):
    """Broadcasts x [R] over the columns of `like` [R, C]; returns [R, 1] in plain Triton."""
    x = beside(x, like)[:, None]
    if hasattr(like.type, "layout"):
        x = x + gl.zeros_like(like)
    return x


@triton.jit
def row_sum(p):
    """Sums each row of a tile [R, TILE] by adding pairs. Of column 8k + 2t + b first b is reduced,
    then k, neighbours first, then t."""
    ROWS: tl.constexpr = p.shape[0]
    TILE: tl.constexpr = p.shape[1]
    x = tl.sum(tl.reshape(p, [ROWS, TILE // 8, 4, 2]), 3)
    for level in tl.static_range(4, 8):
        if TILE >> level > 0:
            x = tl.sum(tl.reshape(x, [ROWS, TILE >> level, 2, 4]), 2)
    return beside(tl.sum(tl.sum(tl.reshape(x, [ROWS, 2, 2]), 2), 1), p)


@triton.jit
def tanh(x):
    """Returns tanh x from exp2 of a negative number: no overflow, one division."""
    t = tl.exp2(tl.abs(x) * -TWO_LOG2E)
    y = tl.div_rn(1.0 - t, 1.0 + t)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def log2_units(m, c):
    """Returns m · c, a maximum in log2 units; an fma, so that no add is contracted with it."""
    return tl.fma(m, c, 0.0)


@triton.jit
def weigh(x, m, c, DEAD: tl.constexpr):
    """Turns scores x [R, TILE] into weights. Returns them, the factor [R] of the earlier state, and
    the new maximum [R]. DEAD: a row may not have seen a key yet (m = -inf)."""
    m_new = tl.maximum(m, tl.max(x, 1))
    base = m_new
    if DEAD:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(x, c, spread(-log2_units(base, c), x)))
    return p, tl.exp2((m - base) * c), m_new


@triton.jit
def add_up(l, alpha, p):
    """Returns l · alpha + the row sums of a tile's weights p."""
    return tl.fma(l, alpha, row_sum(p))


@triton.jit
def fold(M, L, A, m, l, a):
    """Folds the state (m, l, a) of a split into the total (M, L, A): maximum [R] in log2 units, sum
    [R], weighted values [R, D]. A state that saw no key changes nothing."""
    top = tl.maximum(M, m)
    base = tl.where(top == float("-inf"), 0.0, top)
    x = tl.exp2(M - base)
    y = tl.exp2(m - base)
    return top, tl.fma(L, x, l * y), tl.fma(A, spread(x, A), a * spread(y, a))


@triton.jit
def finish(M, L, A, sink2, v_scale):
    """Folds the sink, divides and scales once per row, and multiplies every value; no result is -0.
    Returns the output and the natural log of the denominator."""
    top = tl.maximum(M, sink2)
    base = tl.where(top == float("-inf"), 0.0, top)
    x = tl.exp2(M - base)
    total = tl.fma(L, x, tl.exp2(sink2 - base))
    lit = total > 0.0
    divisor = tl.where(lit, total, 1.0)
    factor = tl.div_rn(x, divisor) * v_scale
    lse = tl.where(lit, (top + tl.log2(divisor)) * LN2, float("-inf"))
    return tl.fma(A, spread(factor, A), 0.0), lse


@triton.jit
def split_begin(s, call):
    """Returns the first position of split s."""
    first = tl.minimum(s, call.count0)
    return first * call.len0 + (s - first) * call.len1


@triton.jit
def load_item(call, n, TILE: tl.constexpr):
    """Loads the n-th item of the table."""
    row = call.items + n * 12
    row_begin, row_end = tl.load(row + 1), tl.load(row + 2)
    lo, hi = tl.load(row + 3), tl.load(row + 4)
    split, split_end = tl.load(row + 5), tl.load(row + 6)
    begin = tl.maximum(split_begin(split, call), lo) // TILE
    end = tl.minimum(split_begin(split_end, call), hi + TILE - 1) // TILE
    return Item(row, tl.load(row), row_begin, row_end, lo, hi, split, split_end, begin, end)


@triton.jit
def rows_of(call, it, r):
    """Returns the tokens and query heads of rows r of an item, and a mask of those that exist."""
    group = call.heads // call.kv_heads
    f = it.row_begin + r
    head = (tl.program_id(0) % call.kv_heads) * group + f % group
    return (f // group).to(tl.int64), head, f < it.row_end


@triton.jit
def seen_by(call, it, r):
    """Returns what rows r of an item see; rows past its end see nothing."""
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
    """Finishes rows r of a block (sink, division, scale, one rounding) and stores out and lse."""
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
def fold_parts(call, it, part, parts, fresh, D_V: tl.constexpr, DEPTH: tl.constexpr):
    """Folds the parts of a block from scratch in ascending order and writes its rows, as many rows
    at a time as the empty state `fresh` has. Loads DEPTH parts at a time; a missing one adds 0."""
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
    """Stores the state of rows r of a part in scratch; a block's last part to arrive folds all."""
    rows = it.row_end - it.row_begin
    kv_head = tl.program_id(0) % call.kv_heads
    part = tl.load(it.row + 7) * call.kv_heads + kv_head * parts * rows
    first = part + tl.load(it.row + 8) * rows
    real = it.row_begin + r < it.row_end
    ml = call.part_ml + 2 * (first + r).to(tl.int64)
    tl.store(ml, m, mask=real)
    tl.store(ml + 1, l, mask=real)
    r = index(a, 0)
    at = (first + r).to(tl.int64)[:, None] * a.shape[1] + index(a, 1)[None, :]
    tl.store(call.part_acc + at, a, mask=(it.row_begin + r < it.row_end)[:, None])
    tl.debug_barrier()  # all threads have stored before one of them increments the counter
    counter = call.counters + tl.load(it.row + 10) * call.kv_heads + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(counter, 0)  # ready for the next launch
        fold_parts(call, it, part, parts, fresh, D_V, DEPTH)
