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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.gemm import row_stride
from lockstep.types import RuleError

SILU, GELU, GELU_TANH, RELU, SIGMOID, CAP, CLAMPED = (
    tl.constexpr(kind) for kind in range(7)
)  # what is done to an element
NEGATIVE_LOG2E = tl.constexpr(-1.4426950408889634)
ROOT_HALF, TANH_SCALE, TANH_CUBE = (
    tl.constexpr(0.7071067811865476),
    tl.constexpr(0.7978845608028654),
    tl.constexpr(0.044715),
)
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
    return tl.exp2(tl.minimum(x * NEGATIVE_LOG2E, 127.0))


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
def rms_norm_kernel(x, residual, weight, y, total, x_stride, residual_stride, eps, N: tl.constexpr, WIDTH: tl.constexpr,
                    LEVELS: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """One row. ADD: x + residual is rounded, stored as `total`, and normed."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < N
    value = tl.load(x + row * x_stride * 8 + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride * 8 + column, mask=inside, other=0.0).to(
            tl.float32
        )
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * N + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    squares = tree_sum(tl.reshape(value * value, [1, WIDTH]), 1, WIDTH, LEVELS)
    scaled = value * inverse_root(squares, eps, 1, N)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + column, (scaled * gain).to(y.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_kernel(
    x, weight, bias, y, x_stride, eps, N: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr
):
    """One row: (x - mean) / sqrt(var + eps) · weight + bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < N
    value = tl.load(x + row * x_stride * 8 + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(
        tree_sum(tl.reshape(value, [1, WIDTH]), 1, WIDTH, LEVELS), tl.full([1], N, tl.float32)
    )
    centred = tl.where(inside, value - mean, 0.0)
    squares = tree_sum(tl.reshape(centred * centred, [1, WIDTH]), 1, WIDTH, LEVELS)
    scaled = centred * inverse_root(squares, eps, 1, N)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + column, (scaled * gain + offset).to(y.dtype.element_ty), mask=inside)


@triton.jit
def normed(value, scale, weight_at, inside, dtype: tl.constexpr):
    """A rounded norm, as float32: what a kernel of its own would have stored."""
    gain = tl.load(weight_at, mask=inside, other=0.0).to(tl.float32)
    return (value * scale[:, None] * gain).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["heads", "kv_heads"])
def qk_norm_rope_kernel(x, weights, cos, sin, q, k, x_stride, heads, kv_heads, eps, D: tl.constexpr, WIDTH: tl.constexpr,
                        LEVELS: tl.constexpr, HALF: tl.constexpr, HALF_WIDTH: tl.constexpr, TAIL_WIDTH: tl.constexpr,
                        BLOCK: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """BLOCK heads of one token, queries then keys: normed if NORM, the first 2 * HALF columns
    turned, the others as they are."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (head < heads + kv_heads)[:, None]
    is_key = head >= heads
    source = (x + token * x_stride * 8 + head * D)[:, None]
    target = tl.where(
        is_key, k + (token * kv_heads + head - heads) * D, q + (token * heads + head) * D
    )[:, None]
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
def gate_kernel(
    x, y, x_stride, alpha, limit, N: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr
):
    """act(gate) · up of columns [0, N) and [N, 2N); CLAMPED: (up + 1) · gate · sigmoid(alpha ·
    gate) within the limits."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    gate = tl.load(x + row * x_stride * 8 + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride * 8 + N + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        value = (up + 1.0) * (gate * act(gate * alpha, limit, SIGMOID))
    else:
        value = act(gate, limit, KIND) * up
    tl.store(y + row * N + column, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def map_kernel(
    x,
    bias,
    y,
    x_stride,
    number,
    N: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """act(x), or x + bias where BIAS."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    value = tl.load(x + row * x_stride * 8 + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    else:
        value = act(value, number, KIND)
    tl.store(y + row * N + column, value.to(y.dtype.element_ty), mask=inside)


# ---- calls ----


@dataclass(frozen=True)
class Rotation:
    """Heads of a row, as `qk_norm_rope` takes them."""

    heads: int
    kv_heads: int
    d: int
    eps: float = 0.0
    interleaved: bool = False


def width(n: int) -> int:
    """The power of two at or above n."""
    return 1 << (n - 1).bit_length()


def warps(n: int) -> int:
    """Warps of a program that does a whole row of n."""
    return min(max(width(n) // 512, 1), 16)


def new_rows(x: Tensor, n: int) -> Tensor:
    """Room for rows of n."""
    return torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, n] / sqrt(mean(x²) + eps) · weight [n]."""
    y, n = new_rows(x, x.shape[1]), x.shape[1]
    if len(x):
        rms_norm_kernel[(len(x),)](
            x, x, weight, y, y, row_stride(x, "x"), 0, eps, N=n, WIDTH=width(n), LEVELS=width(n).bit_length() - 1, ADD=False,
            num_warps=warps(n), enable_fp_fusion=False,
        )  # fmt: skip
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, both [rows, n], rounded; and the `rms_norm` of that: the same bits as two
    calls."""
    if x.shape != residual.shape or x.dtype != residual.dtype:
        got = f"{tuple(x.shape)} {x.dtype} and {tuple(residual.shape)} {residual.dtype}"
        raise RuleError("x and the residual have one shape and dtype", got, "Pass matching rows")
    total, y, n = new_rows(x, x.shape[1]), new_rows(x, x.shape[1]), x.shape[1]
    if len(x):
        rms_norm_kernel[(len(x),)](
            x, residual, weight, y, total, row_stride(x, "x"), row_stride(residual, "residual"), eps,
            N=n, WIDTH=width(n), LEVELS=width(n).bit_length() - 1, ADD=True, num_warps=warps(n), enable_fp_fusion=False,
        )  # fmt: skip
    return total, y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias of x [rows, n]."""
    y, n = new_rows(x, x.shape[1]), x.shape[1]
    if len(x):
        layer_norm_kernel[(len(x),)](
            x, weight, bias, y, row_stride(x, "x"), eps, N=n, WIDTH=width(n), LEVELS=width(n).bit_length() - 1,
            num_warps=warps(n), enable_fp_fusion=False,
        )  # fmt: skip
    return y


def qk_norm_rope(
    x: Tensor, spec: Rotation, weights: Tensor | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """x [t, at least (heads + kv_heads) · d], queries then keys → q [t, heads, d] and k [t,
    kv_heads, d].

    weights [2, d], of queries and of keys, or None; cos and sin float32 [t, half], contiguous: the
    first 2·half columns are turned, columns i and i + half together, or 2i and 2i + 1 if
    interleaved; the result has the first layout always.
    """
    (t, have), half, d = x.shape, cos.shape[1], spec.d
    heads = spec.heads + spec.kv_heads
    if have < heads * d or 2 * half > d or cos.shape != sin.shape or len(cos) != t:
        got = (
            f"x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}, {heads} heads of "
            f"{d}"
        )
        raise RuleError(
            "x holds all heads, and cos and sin turn at most a head's columns, a row per token",
            got,
            "Check the layer's shapes",
        )
    q = torch.empty(t, spec.heads, d, dtype=x.dtype, device=x.device)
    k = torch.empty(t, spec.kv_heads, d, dtype=x.dtype, device=x.device)
    if t:
        qk_norm_rope_kernel[(t, triton.cdiv(heads, HEADS))](
            x, cos if weights is None else weights, cos.contiguous(), sin.contiguous(), q, k, row_stride(x, "x"), spec.heads, spec.kv_heads,
            spec.eps, D=d, WIDTH=width(d), LEVELS=width(d).bit_length() - 1, HALF=half, HALF_WIDTH=width(half),
            TAIL_WIDTH=width(max(d - 2 * half, 1)), BLOCK=HEADS, NORM=weights is not None, INTERLEAVED=spec.interleaved,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return q, k


def gate(kind: int, x: Tensor, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """act(gate) · up of [rows, gate then up]; `kind` as in `kernels/cpu/rows.py`, or CLAMPED with
    its two numbers."""
    n = x.shape[1] // 2
    y = new_rows(x, n)
    if len(x):
        gate_kernel[(len(x), triton.cdiv(n, COLUMNS))](
            x, y, row_stride(x, "x"), alpha, limit, N=n, KIND=kind, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) · up of [rows, gate then up]."""
    return gate(SILU.value, x)


def apply(kind: int, x: Tensor, number: float = 0.0) -> Tensor:
    """An elementwise function of x [rows, n]."""
    return map_rows(x, x, kind, number, False)


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """x [rows, n] + bias [n], rounded: a second rounding behind the GEMM's, whoever computed it."""
    return map_rows(x, bias, RELU.value, 0.0, True)


def map_rows(x: Tensor, bias: Tensor, kind: int, number: float, has_bias: bool) -> Tensor:
    """One launch of `map_kernel`."""
    n = x.shape[1]
    y = new_rows(x, n)
    if len(x):
        map_kernel[(len(x), triton.cdiv(n, COLUMNS))](
            x, bias, y, row_stride(x, "x"), number, N=n, KIND=kind, BIAS=has_bias, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y
