"""The order of a row's softmax on a GPU, in pieces that every attention kernel shares, plain Triton
and Gluon: scores to weights, row sum, fold, output.

Each piece is written so that its bits do not depend on the launch shape (`docs/numerics.md`): fma
where one rounding is meant, the rescale from the difference of maxima, row sums whose every level
adds exactly two numbers. Kernels are compiled with `enable_fp_fusion=False`, so what is written as
a product and a sum stays two roundings. Rows lie along axis 0. A Gluon kernel compiles the same
text; only there tensors have layouts, which are taken from a tensor at hand, so that a transposed
view computes the other way round. Knows tensors of one block; no addresses, no requests.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

LN2 = tl.constexpr(0.6931471805599453)
TWO_LOG2E = tl.constexpr(2.8853900817779268)


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
