"""What a model does to rows between its GEMMs, on the GPU: norms, rotations, gates, biases. One row
at a time, float32 inside.

A row's sum adds two numbers at every level, neighbours first, zeros behind the last column
(`tree_sum`): its bits depend on neither the layout nor the number of warps, and the interpreter's
are the same. Every value that a separate kernel would store is rounded to the storage dtype, fused
or not: the norm of a sum reads the rounded sum, the rotation reads the rounded norm. Products and
sums are two roundings each (`enable_fp_fusion=False`). The CPU's twin is `kernels/cpu/rows.py`.
Knows tensors, no layers. Called by the op table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from lockstep.kernels.triton.gemm import require, row_stride
from lockstep.ops import CosSin, Heads

SILU, GELU, GELU_TANH, RELU, SIGMOID, CAP, CLAMPED = map(tl.constexpr, range(7))  # of an element
NEGATIVE_LOG2E, ROOT_HALF = tl.constexpr(-1.4426950408889634), tl.constexpr(0.7071067811865476)
TANH_SCALE, TANH_CUBE = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)
NAN = tl.constexpr(tl.PropagateNan.ALL)  # the smaller, or larger, of NaN and a number is NaN
SHORTEST = tl.constexpr(1e-12)  # vectors are divided by their length, or by this if shorter
COLUMNS = 1024  # of a row, that one program of an elementwise kernel does
HEADS = 8  # of a token, that one program of `qk_norm_rope` does


# ---- texts ----


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, WIDTH = 2 ** LEVELS] → [ROWS]: neighbours are added, then their sums, and so on."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [ROWS, WIDTH >> (level + 1), 2]), 2)
    return tl.reshape(x, [ROWS])


@triton.jit
def inverse_root(total, eps, ROWS: tl.constexpr, N: tl.constexpr):
    """1 / sqrt(total / N + eps), every operation rounded correctly."""
    mean = tl.div_rn(total, tl.full([ROWS], N, tl.float32))
    return tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def exp_minus(x):
    """e⁻ˣ, at most 2^127."""
    return tl.exp2(tl.minimum(x * NEGATIVE_LOG2E, 127.0, propagate_nan=NAN))


@triton.jit
def tanh(x):
    """tanh, from e^(-2|x|)."""
    e = exp_minus(2.0 * tl.abs(x))
    t = tl.div_rn(1.0 - e, 1.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def act(x, number, KIND: tl.constexpr):
    """An elementwise function; `number` is the cap of CAP."""
    if KIND == SILU:
        return tl.div_rn(x, 1.0 + exp_minus(x))
    elif KIND == GELU:
        return (0.5 * x) * (1.0 + tl.erf(x * ROOT_HALF))
    elif KIND == GELU_TANH:
        return (0.5 * x) * (1.0 + tanh(TANH_SCALE * (x + TANH_CUBE * x * x * x)))
    elif KIND == RELU:
        return tl.where(x < 0.0, 0.0, x)
    elif KIND == CAP:
        return tanh(tl.div_rn(x, number + tl.zeros_like(x))) * number
    else:
        return tl.div_rn(1.0 + tl.zeros_like(x), 1.0 + exp_minus(x))


@triton.jit
def load_row(x, row, stride, column, inside):
    """A row at stride * 8 elements, as float32, zeros behind its end."""
    return tl.load(x + row * stride * 8 + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rms_norm_kernel(x, residual, weight, y, total, x_stride, residual_stride, eps, N: tl.constexpr,
                    WIDTH: tl.constexpr, LEVELS: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """One row. ADD: x + residual is rounded, stored as `total`, and normed."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < N
    value = load_row(x, row, x_stride, column, inside)
    if ADD:
        value += load_row(residual, row, residual_stride, column, inside)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * N + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    squares = tree_sum(tl.reshape(value * value, [1, WIDTH]), 1, WIDTH, LEVELS)
    scaled = value * inverse_root(squares, eps, 1, N)
    gain = load_row(weight, 0, 0, column, inside)
    tl.store(y + row * N + column, (scaled * gain).to(y.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_kernel(x, weight, bias, y, x_stride, eps, N: tl.constexpr, WIDTH: tl.constexpr,
                      LEVELS: tl.constexpr):  # fmt: skip
    """One row: (x - mean) / sqrt(var + eps) · weight + bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < N
    value = load_row(x, row, x_stride, column, inside)
    total = tree_sum(tl.reshape(value, [1, WIDTH]), 1, WIDTH, LEVELS)
    mean = tl.div_rn(total, tl.full([1], N, tl.float32))
    centred = tl.where(inside, value - mean, 0.0)
    squares = tree_sum(tl.reshape(centred * centred, [1, WIDTH]), 1, WIDTH, LEVELS)
    scaled = centred * inverse_root(squares, eps, 1, N)
    gain = load_row(weight, 0, 0, column, inside)
    offset = load_row(bias, 0, 0, column, inside)
    tl.store(y + row * N + column, (scaled * gain + offset).to(y.dtype.element_ty), mask=inside)


@triton.jit
def normed(value, scale, weight_at, inside, dtype: tl.constexpr):
    """A rounded norm, as float32: what a kernel of its own would have stored."""
    gain = tl.load(weight_at, mask=inside, other=0.0).to(tl.float32)
    return (value * scale[:, None] * gain).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["heads", "kv_heads"])
def qk_norm_rope_kernel(x, weights, cos, sin, q, k, x_stride, heads, kv_heads, eps, D: tl.constexpr,
                        WIDTH: tl.constexpr, LEVELS: tl.constexpr, HALF: tl.constexpr,
                        HALF_WIDTH: tl.constexpr, TAIL_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                        NORM: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """BLOCK heads of one token, queries then keys: normed if NORM, the first 2 * HALF columns
    turned, the others as they are."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (head < heads + kv_heads)[:, None]
    is_key = head >= heads
    source = (x + token * x_stride * 8 + head * D)[:, None]
    k_row = k + (token * kv_heads + head - heads) * D
    target = tl.where(is_key, k_row, q + (token * heads + head) * D)[:, None]
    weight_row = weights + tl.where(is_key, D, 0)[:, None]
    dtype: tl.constexpr = q.dtype.element_ty
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if NORM:
        column = tl.arange(0, WIDTH)[None, :]
        value = tl.load(source + column, mask=there & (column < D), other=0.0).to(tl.float32)
        scale = inverse_root(tree_sum(value * value, BLOCK, WIDTH, LEVELS), eps, BLOCK, D)
    i = tl.arange(0, HALF_WIDTH)[None, :]
    inside = there & (i < HALF)
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, i + HALF
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        a = normed(a, scale, weight_row + first, inside, dtype)
        b = normed(b, scale, weight_row + second, inside, dtype)
    c = tl.load(cos + token * HALF + i, mask=i < HALF, other=0.0)
    s = tl.load(sin + token * HALF + i, mask=i < HALF, other=0.0)
    tl.store(target + i, (a * c - b * s).to(dtype), mask=inside)
    tl.store(target + HALF + i, (b * c + a * s).to(dtype), mask=inside)
    if D > 2 * HALF:
        column = 2 * HALF + tl.arange(0, TAIL_WIDTH)[None, :]
        inside = there & (column < D)
        value = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            value = normed(value, scale, weight_row + column, inside, dtype)
        tl.store(target + column, value.to(dtype), mask=inside)


@triton.jit
def cos_sin_kernel(positions, freqs, cos, sin, factor, HALF: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    """One token's angles: a float32 product; cos and sin in float64, rounded, times the factor."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    freq = tl.load(freqs + i, mask=i < HALF, other=0.0)
    angle = (tl.load(positions + token).to(tl.float32) * freq).to(tl.float64)
    tl.store(cos + token * HALF + i, tl.cos(angle).to(tl.float32) * factor, mask=i < HALF)
    tl.store(sin + token * HALF + i, tl.sin(angle).to(tl.float32) * factor, mask=i < HALF)


@triton.jit
def pool_kernel(x, spans, y, x_stride, N: tl.constexpr, WIDTH: tl.constexpr,
                LEVELS: tl.constexpr):  # fmt: skip
    """The mean of rows [begin, end), added in order, divided by its length; float64 inside."""
    span = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(spans + 2 * span), tl.load(spans + 2 * span + 1)
    column = tl.arange(0, WIDTH)
    inside = column < N
    total = tl.zeros([WIDTH], tl.float64)
    for row in range(begin, end):
        total += load_row(x, row, x_stride, column, inside).to(tl.float64)
    mean = total / (end - begin).to(tl.float64)
    squares = tree_sum(tl.reshape(mean * mean, [1, WIDTH]), 1, WIDTH, LEVELS)
    length = tl.maximum(tl.sqrt(squares), SHORTEST, propagate_nan=NAN)
    tl.store(y + span * N + column, (mean / length).to(tl.float32), mask=inside)


@triton.jit
def gate_kernel(x, y, x_stride, alpha, limit, N: tl.constexpr, KIND: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """act(gate) · up of columns [0, N) and [N, 2N); CLAMPED: (up + 1) · gate · sigmoid(alpha ·
    gate) within the limits."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    gate = load_row(x, row, x_stride, column, inside)
    up = load_row(x + N, row, x_stride, column, inside)
    if KIND == CLAMPED:
        gate = tl.minimum(gate, limit, propagate_nan=NAN)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=NAN), limit, propagate_nan=NAN)
        value = (up + 1.0) * (gate * act(gate * alpha, limit, SIGMOID))
    else:
        value = act(gate, limit, KIND) * up
    tl.store(y + row * N + column, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def map_kernel(x, bias, y, x_stride, number, N: tl.constexpr, KIND: tl.constexpr,
               BIAS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """act(x), or x + bias where BIAS."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    value = load_row(x, row, x_stride, column, inside)
    if BIAS:
        value += load_row(bias, 0, 0, column, inside)
    else:
        value = act(value, number, KIND)
    tl.store(y + row * N + column, value.to(y.dtype.element_ty), mask=inside)


# ---- calls ----


def width(n: int) -> int:
    """The power of two at or above n."""
    return 1 << (n - 1).bit_length()


def warps(n: int) -> int:
    """Warps of a program that does a whole row of n."""
    return min(max(width(n) // 512, 1), 16)


def new_rows(x: Tensor, n: int) -> Tensor:
    """Room for rows of n."""
    return torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)


def whole_row(n: int) -> dict[str, Any]:
    """How a program that does a whole row of n is launched."""
    levels = width(n).bit_length() - 1
    shape = {"N": n, "WIDTH": width(n), "LEVELS": levels}
    return shape | {"num_warps": warps(n), "enable_fp_fusion": False}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., n] / sqrt(mean(x²) + eps) · weight [n]."""
    shape, x = x.shape, x.flatten(0, -2)
    (rows, n), y = x.shape, new_rows(x, x.shape[1])
    if rows:
        stride = row_stride(x, "x")
        rms_norm_kernel[(rows,)](x, x, weight, y, y, stride, 0, eps, ADD=False, **whole_row(n))
    return y.view(shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, both [rows, n], rounded; and the `rms_norm` of that: the same bits as two
    calls."""
    alike = x.shape == residual.shape and x.dtype == residual.dtype
    require(alike, "x and the residual have one shape and dtype", x, residual)
    (rows, n), total, y = x.shape, new_rows(x, x.shape[1]), new_rows(x, x.shape[1])
    if rows:
        strides = (row_stride(x, "x"), row_stride(residual, "residual"))
        rms_norm_kernel[(rows,)](
            x, residual, weight, y, total, *strides, eps, ADD=True, **whole_row(n)
        )
    return total, y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias of x [rows, n]."""
    (rows, n), y = x.shape, new_rows(x, x.shape[1])
    if rows:
        stride = row_stride(x, "x")
        layer_norm_kernel[(rows,)](x, weight, bias, y, stride, eps, **whole_row(n))
    return y


def qk_norm_rope(
    x: Tensor, spec: Heads, weights: Tensor | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """x [t, at least (heads + kv_heads) · d], queries then keys → q [t, heads, d] and k [t,
    kv_heads, d].

    weights [2, d], of queries and of keys, or None; cos and sin float32 [t, half], contiguous: the
    first 2·half columns are turned, columns i and i + half together, or 2i and 2i + 1 if
    interleaved; the result has the first layout always.
    """
    (t, have), half, d = x.shape, cos.shape[1], spec.d
    heads = spec.heads + spec.kv_heads
    fits = have >= heads * d and 2 * half <= d and cos.shape == sin.shape and len(cos) == t
    rule = f"x holds {heads} heads of {d}, and cos and sin turn at most {d} columns, a row a token"
    require(fits, rule, x, cos, sin)
    q = torch.empty(t, spec.heads, d, dtype=x.dtype, device=x.device)
    k = torch.empty(t, spec.kv_heads, d, dtype=x.dtype, device=x.device)
    if t:
        qk_norm_rope_kernel[(t, triton.cdiv(heads, HEADS))](
            x, cos if weights is None else weights, cos.contiguous(), sin.contiguous(), q, k,
            row_stride(x, "x"), spec.heads, spec.kv_heads, spec.eps, D=d, WIDTH=width(d),
            LEVELS=width(d).bit_length() - 1, HALF=half, HALF_WIDTH=width(half),
            TAIL_WIDTH=width(max(d - 2 * half, 1)), BLOCK=HEADS, NORM=weights is not None,
            INTERLEAVED=spec.interleaved, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return q, k


def rope_cos_sin(positions: Tensor, freqs: Tensor, factor: float) -> CosSin:
    """cos and sin float32 [t, half] of positions int32 [t] times freqs float32 [half]."""
    t, half = len(positions), len(freqs)
    cos, sin = (torch.empty(t, half, dtype=torch.float32, device=freqs.device) for _ in "cs")
    if t:
        cos_sin_kernel[(t,)](
            positions.contiguous(), freqs, cos, sin, factor, HALF=half, WIDTH=width(half),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return CosSin(cos, sin)


def pool(x: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """float32 [len(spans), n]: the means of rows [begin, end) of x [t, n], divided by their
    lengths."""
    n = x.shape[1]
    y = torch.empty(len(spans), n, dtype=torch.float32, device=x.device)
    if len(spans):
        bounds = torch.tensor(spans, dtype=torch.int64, device=x.device)
        pool_kernel[(len(spans),)](x, bounds, y, row_stride(x, "x"), **whole_row(n))
    return y


def elementwise(x: Tensor, n: int, kind: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and constants of an elementwise kernel whose result has rows of n."""
    shape = {"N": n, "KIND": kind, "COLUMNS": COLUMNS}
    return (len(x), triton.cdiv(n, COLUMNS)), shape | {"num_warps": 4, "enable_fp_fusion": False}


def gate(kind: int, x: Tensor, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """act(gate) · up of [rows, gate then up]; `kind` as in `kernels/cpu/rows.py`, or CLAMPED with
    its two numbers."""
    y = new_rows(x, x.shape[1] // 2)
    if len(x):
        grid, constants = elementwise(x, y.shape[1], kind)
        gate_kernel[grid](x, y, row_stride(x, "x"), alpha, limit, **constants)
    return y


def apply(kind: int, x: Tensor, number: float = 0.0, bias: Tensor | None = None) -> Tensor:
    """An elementwise function of x [rows, n], or x + bias [n] where there is one."""
    n = x.shape[1]
    y = new_rows(x, n)
    if len(x):
        if x.stride(0) % 8:  # an odd vocabulary, or few experts
            x = pad(x, (0, -n % 8))
        grid, constants = elementwise(x, n, kind)
        has_bias = bias is not None
        map_kernel[grid](
            x, bias if has_bias else x, y, row_stride(x, "x"), number, BIAS=has_bias, **constants
        )
    return y


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """x [rows, n] + bias [n], rounded: a second rounding behind the GEMM's, whoever computed it."""
    return apply(RELU.value, x, bias=bias)
