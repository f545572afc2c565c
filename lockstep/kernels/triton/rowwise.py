"""Row operations between GEMMs on the GPU: norms, rotations, gates, biases. One row at a time,
float32 inside.

A row's sum adds two numbers at every level, neighbours first, zeros after the last column
(`tree_sum`): its bits depend on neither the layout nor the number of warps, and are the same in the
interpreter. Every value that a separate kernel would store is rounded to the storage dtype, fused
or not: the norm of a sum reads the rounded sum, the rotation reads the rounded norm. A product and
a sum are two roundings (`enable_fp_fusion=False`). The CPU's counterpart is `kernels/cpu/rows.py`.
Knows tensors, no layers. Called by the op table: shapes and dtypes are those of `lockstep/ops.py`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from lockstep.kernels.triton.gemm import require, row_stride
from lockstep.kernels.triton.softmax import tanh
from lockstep.ops import CosSin, Heads

NEGATIVE_LOG2E, ROOT_HALF = tl.constexpr(-1.4426950408889634), tl.constexpr(0.7071067811865476)
TANH_SCALE, TANH_CUBE = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)
NAN = tl.constexpr(tl.PropagateNan.ALL)  # minimum and maximum of NaN and a number are NaN
SHORTEST = tl.constexpr(1e-12)  # vectors are divided by their length, or by this if shorter
COLUMNS = 1024  # of a row, per program of an elementwise kernel
HEADS = 8  # of a token, per program of `qk_norm_rope`


# ---- kernels ----


@triton.constexpr_function
def width(n: int) -> int:
    """Returns the smallest power of two that is at least n and at least 2."""
    return max(1 << (n - 1).bit_length(), 2)


@triton.constexpr_function
def levels(n: int) -> int:
    """Returns the depth of a binary tree over n = 2 ** depth numbers."""
    return n.bit_length() - 1


@triton.jit
def tree_sum(x):
    """Sums [rows, 2 ** levels] → [rows]: adds neighbours, then neighbouring sums, and so on."""
    for _ in tl.static_range(levels(x.shape[1])):
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def row_sum(x):
    """Sums [2 ** levels] → [1] by `tree_sum`."""
    return tree_sum(tl.reshape(x, [1, x.shape[0]]))


@triton.jit
def inverse_root(total, eps, N: tl.constexpr):
    """Returns 1 / sqrt(total / N + eps), every operation rounded correctly."""
    mean = tl.div_rn(total, tl.full(total.shape, N, tl.float32))
    return tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def exp_minus(x):
    """Returns e⁻ˣ, at most 2^127."""
    return tl.exp2(tl.minimum(x * NEGATIVE_LOG2E, 127.0, propagate_nan=NAN))


@triton.jit
def act(x, number, KIND: tl.constexpr):
    """Applies an elementwise function: an `Activation`, "sigmoid", or "cap" (`number`: the cap)."""
    if KIND == "silu":
        return tl.div_rn(x, 1.0 + exp_minus(x))
    elif KIND == "gelu":
        return (0.5 * x) * (1.0 + tl.erf(x * ROOT_HALF))
    elif KIND == "gelu_tanh":
        return (0.5 * x) * (1.0 + tanh(TANH_SCALE * (x + TANH_CUBE * x * x * x)))
    elif KIND == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif KIND == "cap":
        return tanh(tl.div_rn(x, number + tl.zeros_like(x))) * number
    else:
        return tl.div_rn(1.0 + tl.zeros_like(x), 1.0 + exp_minus(x))


@triton.jit
def load_row(x, row, stride, column, inside):
    """Loads a row as float32, rows stride * 8 elements apart, zeros where not `inside`."""
    return tl.load(x + row * stride * 8 + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def norm_kernel(x, residual, weight, bias, y, total, x_stride, residual_stride, eps,
                N: tl.constexpr):  # fmt: skip
    """Computes one row: x / sqrt(mean(x²) + eps) · weight. With a residual, x is x + residual,
    rounded and stored as `total`. With a bias, x is x - mean, and the bias is added."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width(N))
    inside = column < N
    value = load_row(x, row, x_stride, column, inside)
    if residual is not None:
        value += load_row(residual, row, residual_stride, column, inside)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * N + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if bias is not None:
        mean = tl.div_rn(row_sum(value), tl.full([1], N, tl.float32))
        value = tl.where(inside, value - mean, 0.0)
    scaled = value * inverse_root(row_sum(value * value), eps, N)
    result = scaled * load_row(weight, 0, 0, column, inside)
    if bias is not None:
        result += load_row(bias, 0, 0, column, inside)
    tl.store(y + row * N + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def apply_norm(value, scale, weight_at, inside, dtype: tl.constexpr):
    """Returns the norm rounded to dtype, as float32: what a separate kernel would store."""
    gain = tl.load(weight_at, mask=inside, other=0.0).to(tl.float32)
    return (value * scale[:, None] * gain).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["heads", "kv_heads"])
def qk_norm_rope_kernel(x, weights, cos, sin, q, k, x_stride, heads, kv_heads, eps, D: tl.constexpr,
                        HALF: tl.constexpr, BLOCK: tl.constexpr,
                        INTERLEAVED: tl.constexpr):  # fmt: skip
    """Computes BLOCK heads of one token, queries then keys: normed if there are weights, the first
    2 * HALF columns rotated, the others unrotated."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (head < heads + kv_heads)[:, None]
    is_key = head >= heads
    source = (x + token * x_stride * 8 + head * D)[:, None]
    k_row = k + (token * kv_heads + head - heads) * D
    target = tl.where(is_key, k_row, q + (token * heads + head) * D)[:, None]
    dtype: tl.constexpr = q.dtype.element_ty
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if weights is not None:
        column = tl.arange(0, width(D))[None, :]
        value = tl.load(source + column, mask=there & (column < D), other=0.0).to(tl.float32)
        scale = inverse_root(tree_sum(value * value), eps, D)
        weight_row = weights + tl.where(is_key, D, 0)[:, None]
    i = tl.arange(0, width(HALF))[None, :]
    inside = there & (i < HALF)
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, i + HALF
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    if weights is not None:
        a = apply_norm(a, scale, weight_row + first, inside, dtype)
        b = apply_norm(b, scale, weight_row + second, inside, dtype)
    c = tl.load(cos + token * HALF + i, mask=i < HALF, other=0.0)
    s = tl.load(sin + token * HALF + i, mask=i < HALF, other=0.0)
    tl.store(target + i, (a * c - b * s).to(dtype), mask=inside)
    tl.store(target + HALF + i, (b * c + a * s).to(dtype), mask=inside)
    if D > 2 * HALF:
        column = 2 * HALF + tl.arange(0, width(D - 2 * HALF))[None, :]
        inside = there & (column < D)
        value = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            value = apply_norm(value, scale, weight_row + column, inside, dtype)
        tl.store(target + column, value.to(dtype), mask=inside)


@triton.jit
def cos_sin_kernel(positions, freqs, cos, sin, factor, HALF: tl.constexpr):
    """Computes one token's cos and sin in float64 of float32 angles, rounded, times the factor."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, width(HALF))
    freq = tl.load(freqs + i, mask=i < HALF, other=0.0)
    angle = (tl.load(positions + token).to(tl.float32) * freq).to(tl.float64)
    tl.store(cos + token * HALF + i, tl.cos(angle).to(tl.float32) * factor, mask=i < HALF)
    tl.store(sin + token * HALF + i, tl.sin(angle).to(tl.float32) * factor, mask=i < HALF)


@triton.jit
def pool_kernel(x, spans, y, x_stride, N: tl.constexpr):
    """Computes the mean of rows [begin, end), added in order, over its norm; float64 inside."""
    span = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(spans + 2 * span), tl.load(spans + 2 * span + 1)
    column = tl.arange(0, width(N))
    inside = column < N
    total = tl.zeros([width(N)], tl.float64)
    for row in range(begin, end):
        total += load_row(x, row, x_stride, column, inside).to(tl.float64)
    mean = total / (end - begin).to(tl.float64)
    length = tl.maximum(tl.sqrt(row_sum(mean * mean)), SHORTEST, propagate_nan=NAN)
    tl.store(y + span * N + column, (mean / length).to(tl.float32), mask=inside)


@triton.jit
def map_kernel(x, bias, y, x_stride, alpha, limit, N: tl.constexpr, KIND: tl.constexpr,
               GATED: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Computes act(x) or x + bias. GATED: act(gate) · up of columns [0, N) and [N, 2N) or, if KIND
    is "clamped", (up + 1) · gate · sigmoid(alpha · gate) within the limits."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    value = load_row(x, row, x_stride, column, inside)
    if KIND == "bias":
        value += load_row(bias, 0, 0, column, inside)
    elif KIND == "clamped":
        up = load_row(x + N, row, x_stride, column, inside)
        gate = tl.minimum(value, limit, propagate_nan=NAN)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=NAN), limit, propagate_nan=NAN)
        value = (up + 1.0) * (gate * act(gate * alpha, limit, "sigmoid"))
    elif GATED:
        up = load_row(x + N, row, x_stride, column, inside)
        value = act(value, limit, KIND) * up
    else:
        value = act(value, limit, KIND)
    tl.store(y + row * N + column, value.to(y.dtype.element_ty), mask=inside)


# ---- calls ----


@cache
def whole_row(n: int) -> dict[str, Any]:
    """Returns the launch options of a kernel with one program per row of n columns."""
    warps = min(max(width(n) // 512, 1), 16)
    return {"N": n, "num_warps": warps, "enable_fp_fusion": False}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x [.., n] / sqrt(mean(x²) + eps) · weight [n]."""
    return layer_norm(x.flatten(0, -2), weight, None, eps).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x + residual, rounded, and its `rms_norm`, with the bits of two calls."""
    alike = x.shape == residual.shape and x.dtype == residual.dtype
    require(alike, "x and the residual have the same shape and dtype", x, residual)
    total, y = x.new_empty(x.shape), x.new_empty(x.shape)
    strides = (row_stride(x, "x"), row_stride(residual, "residual"))
    operands = (x, residual, weight, None, y, total, *strides, eps)
    norm_kernel[(len(x),)](*operands, **whole_row(x.shape[1]))
    return total, y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns (x - mean) / sqrt(var + eps) · weight + bias of x [rows, n]; no bias: `rms_norm`."""
    y = x.new_empty(x.shape)
    operands = (x, None, weight, bias, y, None, row_stride(x, "x"), None, eps)
    norm_kernel[(len(x),)](*operands, **whole_row(x.shape[1]))
    return y


def qk_norm_rope(
    x: Tensor, heads: Heads, weights: Tensor | None, cos_sin: CosSin
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries and keys, and the remaining heads of each row of x, as a view."""
    cos, sin = cos_sin
    (t, have), half, d = x.shape, cos.shape[1], heads.d
    count = heads.heads + heads.kv_heads
    fits = have >= count * d and 2 * half <= d and cos.shape == sin.shape and len(cos) == t
    rule = f"x has {count} heads of {d} or more; cos and sin are [tokens, half], 2 * half <= {d}"
    require(fits, rule, x, cos, sin)
    q, k = (x.new_empty(t, n, d) for n in (heads.heads, heads.kv_heads))
    qk_norm_rope_kernel[(t, triton.cdiv(count, HEADS))](
        x, weights, cos.contiguous(), sin.contiguous(), q, k, x_stride=row_stride(x, "x"),
        heads=heads.heads, kv_heads=heads.kv_heads, eps=heads.eps, D=d, HALF=half, BLOCK=HEADS,
        INTERLEAVED=heads.interleaved, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return q, k, x.view(t, have // d, d)[:, count:]


def rope(x: Tensor, cos_sin: CosSin, interleaved: bool) -> Tensor:
    """Rotates x [t, heads, d]; all heads are passed as queries."""
    heads = Heads(x.shape[1], 0, x.shape[2], interleaved=interleaved)
    return qk_norm_rope(x.flatten(1), heads, None, cos_sin)[0]


def rope_cos_sin(positions: Tensor, freqs: Tensor, factor: float) -> CosSin:
    """Returns cos and sin float32 [t, half] of positions int32 [t] times freqs float32 [half]."""
    t, half = len(positions), len(freqs)
    cos, sin = freqs.new_empty(t, half), freqs.new_empty(t, half)
    operands = (positions.contiguous(), freqs, cos, sin, factor)
    cos_sin_kernel[(t,)](*operands, HALF=half, num_warps=1, enable_fp_fusion=False)
    return CosSin(cos, sin)


def pool(x: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Returns float32 [spans, n]: means of rows [begin, end) of x [t, n], each over its norm."""
    y = x.new_empty(len(spans), x.shape[1], dtype=torch.float32)
    bounds = torch.tensor(spans, dtype=torch.int64, device=x.device)
    pool_kernel[(len(spans),)](x, bounds, y, row_stride(x, "x"), **whole_row(x.shape[1]))
    return y


def activate(
    x: Tensor, act: str, gated: bool = False, alpha: float = 0.0, limit: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns act(x) of [rows, n], or of n gates and n ups; act may be "cap", "clamped", "bias"."""
    n = x.shape[1] // 2 if gated else x.shape[1]
    y = x.new_empty(len(x), n)
    if x.stride(0) % 8:  # an odd vocabulary, or few experts
        x = pad(x, (0, -x.shape[1] % 8))
    map_kernel[(len(x), triton.cdiv(n, COLUMNS))](
        x, bias, y, row_stride(x, "x"), alpha, limit, N=n, KIND=act, GATED=gated, COLUMNS=COLUMNS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns cap · tanh(x / cap) of x [rows, n]."""
    return activate(x, "cap", limit=cap)


def act_and_mul(x: Tensor, act: str) -> Tensor:
    """Returns act(gate) · up of x [rows, 2n], gate then up."""
    return activate(x, act, gated=True)


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Returns (up + 1) · gate · sigmoid(alpha · gate) of clamped x [rows, 2n], gate then up."""
    return activate(x, "clamped", True, alpha, limit)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x [rows, n] + bias [n], if any; always a second rounding, after the GEMM's."""
    return x if bias is None else activate(x, "bias", bias=bias)
