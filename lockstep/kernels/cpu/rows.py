"""What a model does to rows between its GEMMs: norms, rotations, gates. float32, one row at a time, in an order written out.

A row's sum of squares is taken in 16 lanes, lane j adding columns j, j+16, ... ascending; lanes fold 8+8, 4+4, 2+2, 1+1; columns past
the last full 16 are added one by one. Everything else is elementwise, with the operations of elementary.py. Nothing depends on how many
rows there are or on which thread computes them. Outputs are new and contiguous; inputs may have strides, but not in the last dimension.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lockstep.kernels.cpu import threads
from lockstep.kernels.cpu.elementary import exp2
from lockstep.kernels.cpu.lanes import (
    add,
    div,
    float32_at,
    fma,
    int64_at,
    lanes_sum,
    less,
    like,
    load,
    mul,
    select,
    splat,
    store,
    sub,
    take,
)
from lockstep.kernels.cpu.threads import relinked
from lockstep.order import LANES, LOG2E

UNIT = 1 << 14  # elements that are worth a thread
NORM, TURN, GATE, HEADS, ADD = 0, 1, 2, 3, 4  # what is done to a row
FIXED, MORE = 9, 8  # entries of every record, and of those that depend on what is done
COUNTER = FIXED + MORE


class Heads(NamedTuple):
    """Queries and keys of a row: how many heads of each, their size, and the eps of their norms."""

    heads: int
    kv_heads: int
    d: int
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension of [..., n], of two or three dimensions."""
    return _run(NORM, x, weight.data_ptr(), _bits(eps))


def add_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + more, both [t, n], and its `rms_norm`: the same bits, in one call."""
    total, y = torch.empty(x.shape), torch.empty(x.shape)
    _call(ADD, x, y, x.shape[1], (weight.data_ptr(), _bits(eps), more.data_ptr(), 4 * more.stride(0), total.data_ptr(), 0, 0, 0))
    return total, y


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [t, heads, d], cos and sin [t, half]: the first 2·half columns turned, the rest as they are.

    Columns i and i + half turn together, or 2i and 2i+1 if interleaved; the result has the first layout always.
    """
    cos, sin = cos.contiguous(), sin.contiguous()
    return _run(TURN, x, cos.data_ptr(), sin.data_ptr(), cos.shape[-1], int(interleaved))


def place_heads(x: Tensor, spec: Heads, weights: tuple[Tensor, Tensor] | None, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """x [t, at least (heads + kv_heads) · d], queries then keys, then what it likes: q [t, heads, d] and k [t, kv_heads, d].

    Both are normed, with a weight each, if there are any, and rotated: the same bits as `rms_norm` and `rotate`, in one call.
    """
    (heads, kv_heads, d, eps), (cos, sin), t = spec, angles, x.shape[0]
    q, k = torch.empty(t, heads, d), torch.empty(t, kv_heads, d)
    norms = (0, 0) if weights is None else (weights[0].data_ptr(), weights[1].data_ptr())
    each = max(1, UNIT // ((heads + kv_heads) * d))
    more = (norms[0], _bits(eps), cos.data_ptr(), sin.data_ptr(), cos.shape[-1], norms[1], heads, k.data_ptr())
    entries = (HEADS, x.data_ptr(), 4 * x.stride(0), 4 * d, q.data_ptr(), t, heads + kv_heads, d, each, *more)
    threads.run(work(), entries, -(-t // each))
    return q, k


def silu_gate(x: Tensor) -> Tensor:
    """silu(gate) · up of [t, gate then up]."""
    return _run(GATE, x)


def _run(what: int, x: Tensor, *more: int) -> Tensor:
    """One call over the rows of x: [outer, n] or [outer, inner, n]."""
    n = x.shape[-1] // 2 if what == GATE else x.shape[-1]
    y = torch.empty(*x.shape[:-1], n)
    _call(what, x, y, n, (*more, *(0,) * (MORE - len(more))))
    return y


def _call(what: int, x: Tensor, y: Tensor, n: int, more: tuple[int, ...]) -> None:
    shape, strides = x.shape, x.stride()
    outer, inner, inner_stride = (shape[0], 1, 0) if len(shape) == 2 else (shape[0], shape[1], 4 * strides[1])
    if outer and inner:
        each = max(1, UNIT // (inner * n))
        entries = (what, x.data_ptr(), 4 * strides[0], inner_stride, y.data_ptr(), outer, inner, n, each, *more)
        threads.run(work(), entries, -(-outer // each))


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


# ---- texts ----


def units(at: Any) -> None:
    """Take units of rows until none is left. The record is `_call`'s entries."""
    record = int64_at(at)
    what, outer, inner, n, each = record[0], record[5], record[6], record[7], record[8]
    first = take(at + 8 * COUNTER) * each
    while first < outer:
        for i in range(first, min(first + each, outer)):
            for j in range(inner):
                x, y = record[1] + i * record[2] + j * record[3], record[4] + 4 * n * (i * inner + j)
                if what == NORM:
                    norm(x, y, n, record[9], record[10])
                elif what == TURN:
                    turn(x, y, n, i, record[9], record[10], record[11], record[12])
                elif what == GATE:
                    gate(x, y, n)
                elif what == ADD:
                    total = record[13] + 4 * n * i
                    plus(x, record[11] + i * record[12], total, n)
                    norm(total, y, n, record[9], record[10])
                else:
                    head(record, i, j, x)
        first = take(at + 8 * COUNTER) * each


def head(record: Any, i: Any, j: Any, x: Any) -> None:
    """One head of one row of `place_heads`."""
    inner, n, heads = record[6], record[7], record[15]
    y = record[4] + 4 * n * (i * heads + j) if j < heads else record[16] + 4 * n * (i * (inner - heads) + j - heads)
    if record[9]:
        norm(x, y, n, record[9] if j < heads else record[14], record[10])
        x = y
    turn(x, y, n, i, record[11], record[12], record[13], 0)


def norm(x: Any, y: Any, n: Any, weight: Any, eps_bits: Any) -> None:
    """One row of `rms_norm`."""
    eps = np.int32(eps_bits).view(np.float32)
    whole = n // LANES * LANES
    squares = splat(np.float32(0))
    for k in range(0, whole, LANES):
        v = load(x + 4 * k)
        squares = fma(v, v, squares)
    total = lanes_sum(squares)
    xs, ys, ws = float32_at(x), float32_at(y), float32_at(weight)
    for k in range(whole, n):
        total = fma(xs[k], xs[k], total)
    scale = np.float32(1) / np.sqrt(total / np.float32(n) + eps)
    for k in range(0, whole, LANES):
        store(y + 4 * k, mul(mul(load(x + 4 * k), splat(scale)), load(weight + 4 * k)))
    for k in range(whole, n):
        ys[k] = xs[k] * scale * ws[k]


def plus(x: Any, more: Any, y: Any, n: Any) -> None:
    """One row of a sum."""
    whole = n // LANES * LANES
    for k in range(0, whole, LANES):
        store(y + 4 * k, add(load(x + 4 * k), load(more + 4 * k)))
    for k in range(whole, n):
        float32_at(y)[k] = float32_at(x)[k] + float32_at(more)[k]


def turn(x: Any, y: Any, n: Any, i: Any, cos: Any, sin: Any, half: Any, interleaved: Any) -> None:
    """One head of row i of `rotate`; in place if it is not interleaved."""
    cos, sin = cos + 4 * half * i, sin + 4 * half * i
    xs, ys, cs, ss = float32_at(x), float32_at(y), float32_at(cos), float32_at(sin)
    whole = 0 if interleaved else half // LANES * LANES
    for k in range(0, whole, LANES):
        a, b, c, s = load(x + 4 * k), load(x + 4 * (half + k)), load(cos + 4 * k), load(sin + 4 * k)
        store(y + 4 * k, sub(mul(a, c), mul(b, s)))
        store(y + 4 * (half + k), add(mul(b, c), mul(a, s)))
    for k in range(whole, half):
        a, b = (xs[2 * k], xs[2 * k + 1]) if interleaved else (xs[k], xs[half + k])
        ys[k] = sub(mul(a, cs[k]), mul(b, ss[k]))
        ys[half + k] = add(mul(b, cs[k]), mul(a, ss[k]))
    for k in range(2 * half, n):
        ys[k] = xs[k]


def gate(x: Any, y: Any, n: Any) -> None:
    """One row of `silu_gate`."""
    whole = n // LANES * LANES
    for k in range(0, whole, LANES):
        store(y + 4 * k, gated(load(x + 4 * k), load(x + 4 * (n + k))))
    xs, ys = float32_at(x), float32_at(y)
    for k in range(whole, n):
        ys[k] = gated(xs[k], xs[n + k])


def gated(x: Any, up: Any) -> Any:
    """x / (1 + e⁻ˣ) · up; e⁻ˣ is at most 2^127."""
    power = mul(x, like(x, -LOG2E))
    power = select(less(like(x, 127.0), power), like(x, 127.0), power)
    return mul(div(x, add(like(x, 1.0), exp2(power))), up)


@functools.cache
def work() -> Any:
    """The compiled kernel of this machine."""
    names = {**globals(), "exp2": njit(exp2)}
    for text in (gated, norm, plus, turn, gate, head):
        names[text.__name__] = njit(error_model="numpy")(relinked(text, names))
    return threads.c_function("row", relinked(units, names))
