"""Row operations between GEMMs, one row at a time: norms, rope angles, rotations, gates, softmax,
pooling. `lockstep/ops.py` specifies each one; called through the table in ops.py.

A row is summed in float32 in 16 lanes, lane j adding columns j, j+16, ... ascending; lanes then
fold 8+8, 4+4, 2+2, 1+1; columns after the last full 16 are added one by one. Angles and pooling are
float64 inside and rounded once. Everything else is elementwise.
"""

import functools
from array import array
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.cpu import elementary, lanes, threads
from lockstep.kernels.cpu.elementary import cos_sin, erf, exp2, tanh
from lockstep.kernels.cpu.lanes import add, div, fma, less, load, maximum, mul, select, store, sub
from lockstep.kernels.cpu.threads import empty, float32_at, int32_at, int64_at, prefetch_rows
from lockstep.ops import Activation, CosSin, Heads
from lockstep.order import LANES, LOG2E

UNIT = 1 << 14  # most elements of a unit of work of several rows
# what a call does to a row
NORM, TURN, GATE, HEADS, ADD, LAYER, ANGLES, MAP, CAP, CLAMPED, SOFTMAX, SHARES = range(12)
SPREAD, COPY, WRITE, TAKE = range(12, 16)
ELEMENT_NS = {ANGLES: 8, WRITE: 4, TAKE: 4}  # per element on one thread; 1 for the rest
SILU, GELU, GELU_TANH, RELU, SIGMOID = range(5)  # the function of GATE and MAP
KINDS = dict(zip(Activation, (SILU, GELU, GELU_TANH, RELU), strict=True))
# of gelu: sqrt(1/2), sqrt(2/pi) and the factor of the cube
ROOT_HALF, TANH_SCALE, TANH_CUBE = 0.7071067811865476, 0.7978845608028654, 0.044715
INF = np.float32(np.inf)
SHORTEST = 1e-12  # vectors are divided by their length, or by this if they are shorter


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) · weight."""
    return _run(NORM, x, weight.data_ptr(), _bits(eps))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x + residual and its `rms_norm` in one call, with the bits of two."""
    total = empty(*x.shape)
    more = (residual.data_ptr(), 4 * residual.stride(0), total.data_ptr())
    return total, _run(ADD, x, weight.data_ptr(), _bits(eps), *more)


def rope(x: Tensor, cos_sin: CosSin, interleaved: bool) -> Tensor:
    """Rotates columns i and i + half as a pair, or 2i and 2i+1 if interleaved."""
    cos, sin = cos_sin
    return _run(TURN, x, cos.data_ptr(), sin.data_ptr(), cos.shape[1], int(interleaved))


def qk_norm_rope(
    x: Tensor, heads: Heads, weights: Tensor | None, cos_sin: CosSin
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries and keys, normed if weights are given and rotated, in one call unless
    interleaved, with the bits of `rms_norm` and `rope`; and values, a view of x."""
    (count, kv_heads, d, eps, interleaved), t = heads, x.shape[0]
    parts = x.numpy().reshape(t, x.shape[1] // d, d)  # numpy keeps the GIL here, torch releases it
    v = torch.from_numpy(parts[:, count + kv_heads :])
    if interleaved:
        q, k = (torch.from_numpy(p) for p in (parts[:, :count], parts[:, count : count + kv_heads]))
        if weights is not None:
            q, k = rms_norm(q, weights[0], eps), rms_norm(k, weights[1], eps)
        return rope(q, cos_sin, True), rope(k, cos_sin, True), v
    q, k = empty(t, count, d), empty(t, kv_heads, d)
    norm_q, (cos, sin) = 0 if weights is None else weights.data_ptr(), cos_sin
    norms = (norm_q, _bits(eps), cos.data_ptr(), sin.data_ptr(), cos.shape[1])
    more = (*norms, norm_q + 4 * d, count, k.data_ptr())
    _call(HEADS, (x.data_ptr(), 4 * x.stride(0), 4 * d), q, (t, count + kv_heads, d), more)
    return q, k, v


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Returns (x - mean) / sqrt(var + eps) · weight + bias."""
    return _run(LAYER, x, weight.data_ptr(), _bits(eps), bias.data_ptr())


def rope_cos_sin(positions: Tensor, freqs: Tensor, factor: float) -> CosSin:
    """Computes angles as float32 products, cos and sin in float64, rounded, then times `factor`."""
    at = positions if positions.dtype is torch.int32 else positions.to(torch.int32)
    at, half = at.contiguous(), freqs.shape[0]
    cos, sin = empty(at.shape[0], half), empty(at.shape[0], half)
    more = (freqs.data_ptr(), _bits(factor), sin.data_ptr())
    _call(ANGLES, (at.data_ptr(), 4, 0), cos, (at.shape[0], 1, half), more)
    return CosSin(cos, sin)


def activate(x: Tensor, act: Activation) -> Tensor:
    """Applies an activation to x [t, n] elementwise."""
    return _run(MAP, x, KINDS[act])


def sigmoid(x: Tensor) -> Tensor:
    """Returns 1 / (1 + e⁻ˣ) of x [t, n]."""
    return _run(MAP, x, SIGMOID)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns cap · tanh(x / cap) of x [t, n]."""
    return _run(CAP, x, _bits(cap))


def act_and_mul(x: Tensor, act: Activation) -> Tensor:
    """Returns act(gate) · up of x [t, 2n], gate then up."""
    return _run(GATE, x, KINDS[act], columns=x.shape[1] // 2)


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Returns (up + 1) · gate · sigmoid(alpha · gate) of x [t, 2n], gate then up, both clamped."""
    return _run(CLAMPED, x, _bits(alpha), _bits(limit), columns=x.shape[1] // 2)


def softmax(x: Tensor) -> Tensor:
    """Returns e^(x - max) over its sum for each row of x [t, n]."""
    return _run(SOFTMAX, x)


def shares(x: Tensor, floor: float) -> Tensor:
    """Returns x / (sum of the row + floor) for each row of x [t, n]."""
    return _run(SHARES, x, _bits(floor))


def spread(x: Tensor, columns: Tensor, size: int) -> Tensor:
    """Returns [t, size]: x [t, n] at distinct columns int64 [n] below `size`, -inf elsewhere."""
    return _run(SPREAD, x, columns.data_ptr(), len(columns), columns=size)


def copy(x: Tensor, y: Tensor) -> None:
    """Copies x to y, both float32 [t, n] with contiguous columns."""
    more = (y.data_ptr(), 4 * y.stride(0))
    _call(COPY, (x.data_ptr(), 4 * x.stride(0), 0), y, (len(x), 1, x.shape[1]), more)


def write(x: Tensor, y: Tensor, slots: Tensor) -> None:
    """Writes y[slots] = x for x [t, heads, n], contiguous y [slots, heads, n] and slots int32 [t].
    Raises IndexError, with nothing written, if a slot is outside of y."""
    (outer, inner, _), size = x.stride(), y.shape[0]
    where = (x.data_ptr(), 4 * outer, 4 * inner)
    _check_range(_call(WRITE, where, y, x.shape, (slots.data_ptr(), size)), slots, size)


def take(x: Tensor, which: Tensor) -> Tensor:
    """Returns x[which] for x [n, d] and integers `which` [t]; raises IndexError if one is out of
    range. Not by torch: its threads then spin for milliseconds on cores that our helpers need."""
    which = which if which.dtype is torch.int32 else which.int()
    y = empty(which.shape[0], x.shape[1])
    more = (which.data_ptr(), x.shape[0], 4 * x.stride(0))
    record = _call(TAKE, (x.data_ptr(), 0, 0), y, (which.shape[0], 1, x.shape[1]), more)
    _check_range(record, which, x.shape[0])
    return y


def _check_range(record: "array[int] | None", numbers: Tensor, size: int) -> None:
    """Raises IndexError if the call found a number outside of [0, size)."""
    if record and record[threads.FAULT]:
        number = next(each for each in numbers.tolist() if not 0 <= each < size)
        raise IndexError(f"slot {number} is out of bounds for axis 0 with size {size}")


def pool(x: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Returns each span's mean row divided by its norm: float64 sums in order, rounded once."""
    rows, y = x.numpy(), np.empty((len(spans), x.shape[1]), np.float32)
    for (begin, end), row in zip(spans, y, strict=True):
        mean = np.zeros(x.shape[1])
        for each in rows[begin:end]:
            mean += each
        mean /= end - begin
        row[:] = mean / max(np.sqrt(np.add.accumulate(mean * mean)[-1]), SHORTEST)
    return torch.from_numpy(y)


def _run(what: int, x: Tensor, *more: int, columns: int = 0) -> Tensor:
    """Runs one call over rows x [outer, n] or [outer, inner, n]; y has `columns` columns, or n."""
    (outer, *inner, n), (x_outer, *x_inner, _) = x.shape, x.stride()
    n = columns or n
    y, (one, step) = empty(outer, *inner, n), (inner[0], x_inner[0]) if inner else (1, 0)
    _call(what, (x.data_ptr(), 4 * x_outer, 4 * step), y, (outer, one, n), more)
    return y


def _call(
    what: int, x: tuple[int, ...], y: Tensor, sizes: Sequence[int], more: tuple[int, ...]
) -> "array[int] | None":
    """Runs one call. x: address, outer and inner stride in bytes; sizes: outer, inner, columns of
    y; `more` depends on `what`. Returns the record, or None if there are no rows."""
    outer, inner, n = sizes
    if not outer or not inner:
        return None
    call = prepared(what, x[1:], (outer, inner, n), len(more), threads.setting())
    return call.run((1, x[0]), (4, y.data_ptr()), *enumerate(more, 9))


@functools.lru_cache(4096)
def prepared(
    what: int, strides: tuple[int, ...], sizes: tuple[int, ...], more: int, _: Any
) -> threads.Call:
    """Builds a call without the addresses of x and y and `more` entries; `_`: threads.setting()."""
    outer, inner, n = sizes
    cost_ns = outer * inner * n * ELEMENT_NS.get(what, 1)
    team = threads.team(outer, cost_ns)
    each = max(1, min(UNIT // (inner * n), -(-outer // team)))
    entries = (what, 0, *strides, 0, outer, inner, n, each, *[0] * more)
    return threads.Call(work(), entries, -(-outer // each), team, cost_ns)


@functools.lru_cache(256)
def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


# ---- compiled functions ----


def unit(at: Any, nth: Any, worker: Any) -> None:
    """Computes up to `each` outer rows. The entries are `_call`'s."""
    record = int64_at(at + threads.ENTRIES)
    x, x_outer, x_inner, y, outer, inner, n, each = (
        record[1], record[2], record[3], record[4], record[5], record[6], record[7], record[8],
    )  # fmt: skip
    first, last = nth * each, min((nth + 1) * each, outer)
    if record[0] >= WRITE and missing_slots(record) > 0:
        int64_at(at)[threads.FAULT], last = 1, first
    prefetch_rows(at, x, x_outer, first, last, min(x_outer, 8 * n * inner))
    for i in range(first, last):
        for j in range(inner):
            row(record, i, j, x + i * x_outer + j * x_inner, y + 4 * n * (i * inner + j))


def missing_slots(record: Any) -> Any:
    """Returns how many slots of `write` or rows of `take` are out of range."""
    slots, missing = int32_at(record[9]), 0
    for i in range(record[5]):
        if slots[i] < 0 or slots[i] >= record[10]:
            missing += 1
    return missing


def row(record: Any, i: Any, j: Any, x: Any, y: Any) -> None:
    """Applies the call's operation to row (i, j)."""
    what, n = record[0], record[7]
    if what == NORM:
        norm(x, y, n, record[9], record[10])
    elif what == TURN:
        rotate(x, y, n, i, record[9], record[10], record[11], record[12])
    elif what == GATE:
        gate_row(y, n, x, x + 4 * n, record[9], 0)
    elif what == HEADS:
        head(record, i, j, x)
    elif what == ADD:
        total = record[13] + 4 * n * i
        add_row(total, n, x, record[11] + i * record[12], 0, 0)
        norm(total, y, n, record[9], record[10])
    elif what == WRITE:
        slot = np.int64(int32_at(record[9])[i])
        copy_row(record[4] + 4 * n * (slot * record[6] + j), n, x, 0)
    elif what == TAKE:
        copy_row(y, n, x + np.int64(int32_at(record[9])[i]) * record[11], 0)
    else:
        apply_other(record, i, j, x, y)


def apply_other(record: Any, i: Any, j: Any, x: Any, y: Any) -> None:
    """Applies an operation that a plain decoder does not run in every layer."""
    what, n = record[0], record[7]
    if what == LAYER:
        layer(x, y, n, record[9], record[10], record[11])
    elif what == ANGLES:
        angle_row(int32_at(x)[0], y, record[11] + 4 * n * i, n, record[9], record[10])
    elif what == MAP:
        act_row(y, n, x, record[9])
    elif what == CAP:
        cap_row(y, n, x, np.int32(record[9]).view(np.float32))
    elif what == CLAMPED:
        alpha, limit = np.int32(record[9]).view(np.float32), np.int32(record[10]).view(np.float32)
        clamp_row(y, n, x, x + 4 * n, alpha, limit)
    elif what == SOFTMAX:
        softmax_row(x, y, n)
    elif what == SPREAD:
        spread_row(x, y, n, int64_at(record[9]), record[10])
    elif what == COPY:
        copy_row(record[9] + i * record[10], n, x, 0)
    else:
        floor = np.int32(record[9]).view(np.float32)
        divide_row(y, n, x, add(sum_row(x, n, 0), floor))


def head(record: Any, i: Any, j: Any, x: Any) -> None:
    """Computes one head of one row of `qk_norm_rope`."""
    inner, n, heads = record[6], record[7], record[15]
    y, weight = record[4] + 4 * n * (i * heads + j), record[9]
    if j >= heads:  # a key's
        y, weight = record[16] + 4 * n * (i * (inner - heads) + j - heads), record[14]
    if record[9]:
        norm(x, y, n, weight, record[10])
        x = y
    rotate(x, y, n, i, record[11], record[12], record[13], 0)


f: Any = None  # the elementwise function of a loop; `work` binds one per `Loop`
Loop = namedtuple("Loop", "template f")  # called with the template's arguments


def map_loop(y: Any, n: Any, x: Any, a: Any) -> None:
    """Computes y[k] = f(x[k], a) for n columns; may be in place."""
    whole = n // LANES * LANES
    for k in range(0, whole, LANES):
        store(y + 4 * k, f(load(x + 4 * k), a))
    for k in range(whole, n):
        float32_at(y)[k] = f(float32_at(x)[k], a)


def zip_loop(y: Any, n: Any, x: Any, w: Any, a: Any, b: Any) -> None:
    """Computes y[k] = f(x[k], w[k], a, b) for n columns; may be in place."""
    whole = n // LANES * LANES
    for k in range(0, whole, LANES):
        store(y + 4 * k, f(load(x + 4 * k), load(w + 4 * k), a, b))
    for k in range(whole, n):
        float32_at(y)[k] = f(float32_at(x)[k], float32_at(w)[k], a, b)


def sum_loop(x: Any, n: Any, a: Any) -> Any:
    """Returns a row's sum in the canonical order of lanes; f(sum, x[k], a) adds one element."""
    whole = n // LANES * LANES
    sums = lanes.splat(np.float32(0))
    for k in range(0, whole, LANES):
        sums = f(sums, load(x + 4 * k), a)
    total = lanes.fold_sum(sums)
    for k in range(whole, n):
        total = f(total, float32_at(x)[k], a)
    return total


def scale_of(squares: Any, n: Any, eps_bits: Any) -> Any:
    """Returns 1 / sqrt(squares / n + eps)."""
    return np.float32(1) / np.sqrt(squares / np.float32(n) + np.int32(eps_bits).view(np.float32))


def norm(x: Any, y: Any, n: Any, weight: Any, eps_bits: Any) -> None:
    """Computes one row of `rms_norm`."""
    scale_row(y, n, x, weight, scale_of(square_row(x, n, 0), n, eps_bits), 0)


def layer(x: Any, y: Any, n: Any, weight: Any, eps_bits: Any, bias: Any) -> None:
    """Computes one row of `layer_norm`."""
    mean = sum_row(x, n, 0) / np.float32(n)
    scale = scale_of(deviate_row(x, n, mean), n, eps_bits)
    centre_row(y, n, x, weight, mean, scale)
    add_row(y, n, y, bias, 0, 0)


def rotate(x: Any, y: Any, n: Any, i: Any, cos: Any, sin: Any, half: Any, interleaved: Any) -> None:
    """Computes one head of row i of `rope`; may be in place if not interleaved."""
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


def act(x: Any, kind: Any) -> Any:
    """Applies an `Activation` or the sigmoid."""
    if kind == SILU:
        return div(x, add(1.0, exp_minus(x)))
    if kind == GELU:
        return mul(mul(0.5, x), add(1.0, erf(mul(x, ROOT_HALF))))
    if kind == GELU_TANH:
        cube = mul(mul(mul(TANH_CUBE, x), x), x)
        return mul(mul(0.5, x), add(1.0, tanh(mul(TANH_SCALE, add(x, cube)))))
    if kind == RELU:
        return select(less(x, 0.0), 0.0, x)
    return div(1.0, add(1.0, exp_minus(x)))


def exp_minus(x: Any) -> Any:
    """Returns e⁻ˣ, at most 2^127."""
    exponent = mul(x, -LOG2E)
    return exp2(select(less(127.0, exponent), 127.0, exponent))


def clamped(gate: Any, up: Any, alpha: Any, limit: Any) -> Any:
    """Returns (up + 1) · gate / (1 + e^(-alpha · gate)); gate at most `limit`, up within ±limit."""
    low = sub(0.0, limit)
    gate = select(less(limit, gate), limit, gate)
    up = select(less(limit, up), limit, select(less(up, low), low, up))
    return mul(add(up, 1.0), mul(gate, act(mul(gate, alpha), SIGMOID)))


def softmax_row(x: Any, y: Any, n: Any) -> None:
    """Computes one row of `softmax`."""
    whole, tops = n // LANES * LANES, lanes.splat(-INF)
    for k in range(0, whole, LANES):
        tops = maximum(tops, load(x + 4 * k))
    top = lanes.fold_max(tops)
    for k in range(whole, n):
        top = maximum(top, float32_at(x)[k])
    power_row(y, n, x, top)
    divide_row(y, n, y, sum_row(y, n, 0))


def spread_row(x: Any, y: Any, n: Any, columns: Any, count: Any) -> None:
    """Computes one row of `spread`."""
    for k in range(n):
        float32_at(y)[k] = -INF
    for k in range(count):
        float32_at(y)[columns[k]] = float32_at(x)[k]


def angle_row(position: Any, cos: Any, sin: Any, n: Any, freqs: Any, factor_bits: Any) -> None:
    """Computes one row of `rope_cos_sin`."""
    factor, at = np.int32(factor_bits).view(np.float32), np.float32(position)
    cs, ss, fs = float32_at(cos), float32_at(sin), float32_at(freqs)
    for k in range(n):
        c, s = cos_sin(np.float64(mul(at, fs[k])))
        cs[k] = mul(np.float32(c), factor)
        ss[k] = mul(np.float32(s), factor)


copy_row: Any = Loop(map_loop, lambda v, _: v)
divide_row: Any = Loop(map_loop, lambda v, by: div(v, by))
power_row: Any = Loop(map_loop, lambda v, top: exp2(mul(sub(v, top), LOG2E)))
cap_row: Any = Loop(map_loop, lambda v, cap: mul(tanh(div(v, cap)), cap))
act_row: Any = Loop(map_loop, act)
add_row: Any = Loop(zip_loop, lambda v, w, a, b: add(v, w))
scale_row: Any = Loop(zip_loop, lambda v, w, scale, _: mul(mul(v, scale), w))
centre_row: Any = Loop(zip_loop, lambda v, w, mean, scale: mul(mul(sub(v, mean), scale), w))
gate_row: Any = Loop(zip_loop, lambda v, w, kind, _: mul(act(v, kind), w))
clamp_row: Any = Loop(zip_loop, clamped)
sum_row: Any = Loop(sum_loop, lambda total, v, _: add(total, v))
square_row: Any = Loop(sum_loop, lambda total, v, _: fma(v, v, total))
deviate_row: Any = Loop(sum_loop, lambda total, v, mean: fma(sub(v, mean), sub(v, mean), total))
INLINED = ("norm", "rotate", "head", "row", "scale_of", "add_row", "scale_row", "square_row")


@functools.cache
def work() -> Any:
    """Returns the row kernel, compiled once per process."""
    names = threads.linked({**vars(elementary), **globals()}, {}, INLINED)
    for name, loop in globals().items():
        if isinstance(loop, Loop):
            own = {**names, "f": threads.jitted(loop.f, names)}
            names[name] = threads.jitted(loop.template, own, inlined=name in INLINED)
    return threads.kernel("row", names["unit"])
