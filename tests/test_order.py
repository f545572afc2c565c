"""The canonical order, stated a second time in slow plain Python, against the compiled kernel:
every bit of every row.

Each operation below is one IEEE float32 operation; fma is the C library's. If an addition in the
kernel is reordered, on purpose or by a compiler flag, this test fails even where all invariances
are kept.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math

import numpy as np
import pytest
import torch

from lockstep import order
from lockstep.attention.cpu import Handle, Table, call
from lockstep.kernels.cpu import elementary as el
from lockstep.kernels.cpu.attend import compiled
from lockstep.types import AttnSpec, GroupSpec, Layout

LIBM = ctypes.CDLL(ctypes.util.find_library("m"))
LIBM.fmaf.restype, LIBM.fmaf.argtypes = ctypes.c_float, (ctypes.c_float,) * 3
F = np.float32
INF = F(np.inf)


def fma(a, b, c):
    return F(LIBM.fmaf(float(a), float(b), float(c)))


def exp2(x):
    if x < F(-126):
        return F(0)
    t = F(x) + F(el.ROUND)
    n = t - F(el.ROUND)
    f, y = F(x) - n, F(el.E6)
    for e in (el.E5, el.E4, el.E3, el.E2, el.E1, 1.0):
        y = fma(y, f, F(e))
    return y * F(2.0 ** int(n))


def tile_sum(p):
    lanes = [F(0)] * order.LANES
    for i, x in enumerate(p):
        lanes[i % order.LANES] = lanes[i % order.LANES] + x
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[j] + lanes[j + half] for j in range(half)]
    return lanes[0]


def fold(M, L, A, m, total, acc):
    n = max(M, m)
    base = F(0) if n == -INF else n
    x, y = exp2(M - base), exp2(m - base)
    return n, fma(L, x, total * y), [fma(a, x, b * y) for a, b in zip(A, acc, strict=True)]


def row(q, k, v, lo, hi, scales, sink2, tile, split):
    """Returns out and log2-sum-exp of one row and head: q [D], k [n, D], v [n, Dv]; it sees [lo,
    hi)."""
    (c, v_scale), d_v = scales, v.shape[1]
    M, L, A = -INF, F(0), [F(0)] * d_v
    for s in range(0, hi, split):
        m, total, acc = -INF, F(0), [F(0)] * d_v
        for t in range(s, min(s + split, hi), tile):
            seen = [p for p in range(t, t + tile) if lo <= p < hi]
            if not seen:
                continue
            x = {}
            for p in seen:
                x[p] = F(0)
                for i in range(len(q)):
                    x[p] = fma(q[i], k[p, i], x[p])
            top = max(m, max(x.values()))
            shift = -(top * c)
            p_row = [exp2(fma(x[p], c, shift)) if p in x else F(0) for p in range(t, t + tile)]
            alpha = exp2((m - top) * c)
            total = fma(total, alpha, tile_sum(p_row))
            acc = [a * alpha for a in acc]
            for p in seen:
                acc = [fma(p_row[p - t], v[p, j], acc[j]) for j in range(d_v)]
            m = top
        M, L, A = fold(M, L, A, m * c if m > -INF else -INF, total, acc)
    M, L, A = fold(M, L, A, sink2, F(1), [F(0)] * d_v)
    out = [a / L * v_scale + F(0) for a in A]
    return np.array(out, F), F(float(M) + math.log2(float(L)))


@pytest.mark.parametrize(
    ("n", "lo", "sink"),
    [
        (5, 0, -INF),
        (64, 0, F(0.7)),
        (70, 0, -INF),
        (150, 83, F(-1.5)),
        (530, 0, -INF),
        (530, 500, F(2.0)),
    ],
)
def test_the_kernel_adds_in_the_canonical_order(n, lo, sink):
    rng = np.random.default_rng(n)
    heads, d_qk, d_v = 2, 24, 8
    q = rng.standard_normal((1, heads, d_qk), dtype=F)
    k, v = rng.standard_normal((n, 1, d_qk), dtype=F), rng.standard_normal((n, 1, d_v), dtype=F)
    tile, split = order.tile_len(d_qk, d_v), order.SPLIT_LEN
    ids = rng.permutation(n).astype(np.int32)
    pool_k, pool_v = np.empty_like(k), np.empty_like(v)
    pool_k[ids], pool_v[ids] = k, v
    out, lse = np.empty((1, heads, d_v), F), np.empty((1, heads), F)
    one = lambda *x: np.array(x, np.int32)  # noqa: E731
    pages = (ids, one(0, n), one(0), one(n), one(0, 0), one())
    table = Table(*pages, lo=one(lo), hi=one(n), blocks=one(0, 0, 1).reshape(1, 3))
    spec = GroupSpec(Layout.DENSE, heads, 1, d_qk, d_v, (AttnSpec(1.0),), page_size=1)
    handle = Handle(
        spec=spec, table=table, page_size=1, tile=tile, split=split, largest=1, layers={}
    )
    scales = F(0.3 * order.LOG2E), F(1.5)
    layer = np.array((0.0, *scales, *[sink] * heads), F)
    arrays = map(torch.from_numpy, (q, pool_k, pool_v, out, lse))
    call(compiled(), *arrays, handle, torch.from_numpy(layer))
    for h in range(heads):
        want, want_lse2 = row(q[0, h], k[:, 0], v[:, 0], lo, n, scales, sink, tile, split)
        assert out[0, h].tobytes() == want.tobytes(), (out[0, h], want)
        # the C library's log2, rounded once
        assert lse[0, h] == pytest.approx(F(want_lse2) * F(order.LN2), rel=2e-7)
