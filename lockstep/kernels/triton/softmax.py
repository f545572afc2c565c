"""A row's softmax on a GPU, in pieces that every attention kernel shares, plain Triton and Gluon:
scores to weights, row sum, fold; what the rows of an item see, and where they go: to the output,
or, as a part of their block, to the scratch, where the last of the block to arrive folds all parts.

Each piece is written so that its bits do not depend on the launch shape (`docs/numerics.md`): fma
where one rounding is meant, the rescale from the difference of maxima, row sums whose every level
adds exactly two numbers. Kernels are compiled with `enable_fp_fusion=False`, so what is written as
a product and a sum stays two roundings. Rows lie along axis 0. A Gluon kernel compiles the same
text; only there tensors have layouts, which are taken from a tensor at hand, so that a transposed
view computes the other way round.
"""

from collections import namedtuple

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

LN2 = tl.constexpr(0.6931471805599453)
TWO_LOG2E = tl.constexpr(2.8853900817779268)
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
def index(like, AXIS: tl.constexpr):
    """The numbers of the rows (0) or columns (1) of `like` [R, C]."""
    if hasattr(like.type, "layout"):
        return gl.arange(0, like.shape[AXIS], layout=gl.SliceLayout(1 - AXIS, like.type.layout))
    else:
        return tl.arange(0, like.shape[AXIS])


@triton.jit
def beside(x, like):
    """x [R] where the rows of `like` [R, C] are."""
    if hasattr(like.type, "layout"):
        x = gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))
    return x


@triton.jit
def spread(x, like):
    """x [R] over the columns of `like` [R, C]."""
    x = beside(x, like)[:, None]
    if hasattr(like.type, "layout"):
        x = x + gl.zeros_like(like)
    return x


@triton.jit
def row_sum(p):
    """Sum over a tile, two by two. Column 8k + 2t + b: first the pairs b, then k, neighbours first,
    then t."""
    ROWS: tl.constexpr = p.shape[0]
    TILE: tl.constexpr = p.shape[1]
    x = tl.sum(tl.reshape(p, [ROWS, TILE // 8, 4, 2]), 3)
    for level in tl.static_range(4, 8):
        if TILE >> level > 0:
            x = tl.sum(tl.reshape(x, [ROWS, TILE >> level, 2, 4]), 2)
    return beside(tl.sum(tl.sum(tl.reshape(x, [ROWS, 2, 2]), 2), 1), p)


@triton.jit
def tanh(x):
    """tanh by exp2 of a negative number: no overflow, one division."""
    t = tl.exp2(tl.abs(x) * -TWO_LOG2E)
    y = tl.div_rn(1.0 - t, 1.0 + t)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def log2_units(m, c):
    """A maximum of raw scores times c: an fma, so that no kernel contracts it with what follows."""
    return tl.fma(m, c, 0.0)


@triton.jit
def weigh(x, m, c, DEAD: tl.constexpr):
    """Scores x of a tile to weights, the rescale of what was before, and the new maximum. DEAD: a
    row may have seen nothing yet."""
    m_new = tl.maximum(m, tl.max(x, 1))
    base = m_new
    if DEAD:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(x, c, spread(-log2_units(base, c), x)))
    return p, tl.exp2((m - base) * c), m_new


@triton.jit
def add_up(l, alpha, p):
    """The sum so far, rescaled, and a tile's weights."""
    return tl.fma(l, alpha, row_sum(p))


@triton.jit
def fold(M, L, A, m, l, a):
    """Adds the state (m, l, a) of a split to the total (M, L, A). Maxima in log2 units; a state
    that saw nothing adds nothing."""
    top = tl.maximum(M, m)
    base = tl.where(top == float("-inf"), 0.0, top)
    x = tl.exp2(M - base)
    y = tl.exp2(m - base)
    return top, tl.fma(L, x, l * y), tl.fma(A, spread(x, A), a * spread(y, a))


@triton.jit
def finish(M, L, A, sink2, v_scale):
    """The sink as one more fold, one division and the scale per row, one product per value; never
    -0. Returns the output and the natural log of the denominator."""
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
    first = part + tl.load(it.row + 8) * rows
    real = it.row_begin + r < it.row_end
    ml = call.part_ml + 2 * (first + r).to(tl.int64)
    tl.store(ml, m, mask=real)
    tl.store(ml + 1, l, mask=real)
    r = index(a, 0)
    at = (first + r).to(tl.int64)[:, None] * a.shape[1] + index(a, 1)[None, :]
    tl.store(call.part_acc + at, a, mask=(it.row_begin + r < it.row_end)[:, None])
    tl.debug_barrier()  # every thread's part is written before one of them says so
    counter = call.counters + tl.load(it.row + 10) * call.kv_heads + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(counter, 0)  # ready for the next launch
        fold_parts(call, it, part, parts, fresh, D_V, DEPTH)
