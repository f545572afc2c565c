"""The order of a row's softmax on a GPU, in pieces that every attention kernel shares: scores to
weights, row sum, fold, output.

Each piece is written so that its bits do not depend on the launch shape (`docs/numerics.md`): fma
where one rounding is meant, the rescale from the difference of maxima, row sums whose every level
adds exactly two numbers. Kernels are compiled with `enable_fp_fusion=False`, so what is written as
a product and a sum stays two roundings. Knows tensors of one block; no addresses, no requests.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
TWO_LOG2E = tl.constexpr(2.8853900817779268)


@triton.jit
def row_sum(p, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Sum over a tile, two by two. Column 8k + 2t + b: first the pairs b, then k, neighbours first,
    then t."""
    x = tl.sum(tl.reshape(p, [ROWS, TILE // 8, 4, 2]), 3)
    if TILE >= 128:
        x = tl.sum(tl.reshape(x, [ROWS, 8, 2, 4]), 2)
    if TILE >= 64:
        x = tl.sum(tl.reshape(x, [ROWS, 4, 2, 4]), 2)
    if TILE >= 32:
        x = tl.sum(tl.reshape(x, [ROWS, 2, 2, 4]), 2)
    x = tl.sum(tl.reshape(x, [ROWS, 2, 4]), 1)
    return tl.sum(tl.sum(tl.reshape(x, [ROWS, 2, 2]), 2), 1)


@triton.jit
def tanh(x):
    """tanh by exp2 of a negative number: no overflow, one division."""
    t = tl.exp2(tl.abs(x) * -TWO_LOG2E)
    y = tl.div_rn(1.0 - t, 1.0 + t)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def weigh(x, seen, m, l, c, pre, CAP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Scores x of a tile to weights. Returns p, the rescale of what was before, the new maximum and
    the new sum."""
    if CAP:
        x = tanh(x * pre)
    x = tl.where(seen, x, float("-inf"))
    m_new = tl.maximum(m, tl.max(x, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(x, c, -tl.fma(base, c, 0.0)[:, None]))
    alpha = tl.exp2((m - base) * c)
    return p, alpha, m_new, tl.fma(l, alpha, row_sum(p, ROWS, TILE))


@triton.jit
def fold(M, L, A, m, l, a):
    """Adds the state (m, l, a) of a split to the total (M, L, A). Maxima in log2 units; a state
    that saw nothing adds nothing."""
    top = tl.maximum(M, m)
    base = tl.where(top == float("-inf"), 0.0, top)
    x = tl.exp2(M - base)
    y = tl.exp2(m - base)
    return top, tl.fma(L, x, l * y), tl.fma(A, x[:, None], a * y[:, None])


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
    return tl.fma(A, factor[:, None], 0.0), lse
