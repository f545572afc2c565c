"""The CPU attention kernel: right against float64, and the same bits whatever is computed together.

Every test case is a `Case`: keys and values by (request, position), rows that see [lo, hi), and a
layout (page size, scattered pages, lists) that must not matter. Slots that no row sees contain NaN
throughout, so reading one too many fails the value tests as well.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from lockstep import order
from lockstep.attention.cpu import Handle, Table, call
from lockstep.kernels.cpu import attend, elementary
from lockstep.kernels.cpu.threads import limited, linked
from lockstep.types import KV_FORMATS, AttnSpec, GroupSpec, Layout

NO_LIST = 2**31 - 1
BLOCK = 32  # rows per block


@dataclass(frozen=True)
class Case:
    """lens: keys of each request. rows: (request, lo, hi) each; rows of a request are adjacent."""

    lens: tuple[int, ...]
    rows: tuple[tuple[int, int, int], ...]
    heads: int = 4
    kv_heads: int = 1
    d_qk: int = 64
    d_v: int = 64
    dtype: torch.dtype = torch.float32
    latent: bool = False
    cap: float = 0.0
    sinks: bool = False
    v_scale: float = 1.0
    page_size: int = 16
    block: int = BLOCK
    tails: dict[int, int] = field(default_factory=dict)  # row -> first listed position


DTYPES = {getattr(torch, f.torch_name): name for name, f in KV_FORMATS.items()}


def bound(table: Table, heads: int, kv_heads: int, d_qk: int, d_v: int, **more: Any) -> Handle:
    """Returns the handle of a group with these heads, for one call."""
    spec = GroupSpec(Layout.DENSE, heads, kv_heads, d_qk, d_v, (AttnSpec(1.0),), **more)
    return Handle(
        spec=spec,
        table=table,
        page_size=spec.page_size,
        tile=order.tile_len(d_qk, d_v),
        split=order.SPLIT_LEN,
        largest=len(table.lo),
        layers={},
    )


def causal(lens: list[int], news: list[int], window: int = 0) -> tuple[tuple[int, int, int], ...]:
    """Returns the last `news[r]` positions of every request as rows. Each sees itself and the keys
    before it, or `window` of them."""
    rows = []
    for r, (length, new) in enumerate(zip(lens, news, strict=True)):
        for p in range(length - new, length):
            rows.append((r, max(0, p + 1 - window) if window else 0, p + 1))
    return tuple(rows)


def tensors(case: Case) -> tuple[Any, Any, Any, Any]:
    """Returns q [T, H, Dqk]; per request k [S, KVH, Dqk] and v [S, KVH, Dv] in the case's dtype;
    sinks. They depend on sizes, not on the layout."""
    rng = torch.Generator().manual_seed(7)
    q = torch.randn(len(case.rows), case.heads, case.d_qk, generator=rng)
    k = [torch.randn(n, case.kv_heads, case.d_qk, generator=rng).to(case.dtype) for n in case.lens]
    v = [
        x[..., : case.d_v]
        if case.latent
        else torch.randn(*x.shape[:2], case.d_v, generator=rng).to(case.dtype)
        for x in k
    ]
    sinks = (
        torch.randn(case.heads, generator=rng).numpy()
        if case.sinks
        else np.full(case.heads, -np.inf, np.float32)
    )
    return q, k, v, sinks


def poison(case: Case, slots: int, width: int) -> Any:
    """Returns a pool full of NaN."""
    return torch.full((slots, case.kv_heads, width), float("nan")).to(case.dtype)


def layout(case: Case, k: Any, v: Any) -> tuple[Any, Any, Table]:
    """Returns pools with every key in its place, and the table that says where keys are and which
    rows see them."""
    page, rng = case.page_size, np.random.default_rng(3)
    seen_from = [
        min((lo for r, lo, hi in case.rows if r == q and lo < hi), default=0)
        for q in range(len(case.lens))
    ]
    first_pos = np.array(
        [x // page * page for x in seen_from], np.int32
    )  # pages before a window are released
    counts = [-(-(n - f) // page) for n, f in zip(case.lens, first_pos, strict=True)]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    listed_len = sum(case.rows[t][2] - s for t, s in case.tails.items())
    slots = (int(indptr[-1]) + 3) * page + listed_len + 5
    ids = rng.permutation(int(indptr[-1]) + 3)[: int(indptr[-1])].astype(np.int32)
    pool_k = poison(case, slots, case.d_qk)
    pool_v = pool_k if case.latent else poison(case, slots, case.d_v)
    lowest_tail = {
        r: min([s for t, s in case.tails.items() if case.rows[t][0] == r], default=NO_LIST)
        for r in range(len(case.lens))
    }
    for r, n in enumerate(case.lens):
        highest = max((hi for q, lo, hi in case.rows if q == r and lo < hi), default=0)
        for p in range(max(seen_from[r], int(first_pos[r])), min(n, highest, lowest_tail[r])):
            slot = ids[indptr[r] + (p - first_pos[r]) // page] * page + p % page
            pool_k[slot] = k[r][p]
            if not case.latent:
                pool_v[slot] = v[r][p]
    start = np.full(len(case.rows), NO_LIST, np.int32)
    tails, tail_indptr, free = [], [0], slots - 1
    for t, (r, _, hi) in enumerate(case.rows):
        start[t] = case.tails.get(t, NO_LIST)
        for p in range(int(start[t]), hi):
            pool_k[free] = k[r][p]
            if not case.latent:
                pool_v[free] = v[r][p]
            tails.append(free)
            free -= 1
        tail_indptr.append(len(tails))
    return (
        pool_k,
        pool_v,
        Table(
            ids,
            indptr,
            first_pos,
            start,
            np.array(tail_indptr, np.int32),
            np.array(tails, np.int32),
            np.array([lo for _, lo, _ in case.rows], np.int32),
            np.array([hi for _, _, hi in case.rows], np.int32),
            blocks_of(case),
        ),
    )


def blocks_of(case: Case) -> Any:
    """Returns blocks of at most `case.block` rows, each within one request."""
    blocks, begin = [], 0
    while begin < len(case.rows):
        r, end = case.rows[begin][0], begin
        while end < len(case.rows) and case.rows[end][0] == r and end - begin < case.block:
            end += 1
        blocks.append((r, begin, end))
        begin = end
    return np.array(blocks, np.int32)


def scale_of(case: Case) -> tuple[float, float]:
    """Returns (pre, c) of the case: scale and log2 e, around the soft cap."""
    scale = case.d_qk**-0.5
    if case.cap:
        return float(np.float32(scale / case.cap)), float(np.float32(case.cap * order.LOG2E))
    return 0.0, float(np.float32(scale * order.LOG2E))


def compute(
    case: Case, q: Any, pools: tuple[Any, Any, Table], sinks: Any, kernel: Any = None
) -> tuple[Any, Any]:
    """Returns (out, lse) of the case's rows over these pools."""
    pool_k, pool_v, table = pools
    out = torch.full((len(case.rows), case.heads, case.d_v), 7.0)
    lse = torch.full((len(case.rows), case.heads), 7.0)
    sizes = (case.heads, case.kv_heads, case.d_qk, case.d_v)
    handle = bound(table, *sizes, page_size=case.page_size, kv_dtype=DTYPES[case.dtype])
    sink2 = (sinks * order.LOG2E).astype(np.float32)
    layer = torch.tensor((*scale_of(case), case.v_scale, *sink2.tolist()))
    call(kernel or attend.compiled(), q, pool_k, pool_v, out, lse, handle, layer)
    return out.numpy(), lse.numpy()


def run(case: Case, kernel: Any = None, spoil: Any = None) -> tuple[Any, Any]:
    """Returns (out, lse) of a case; `spoil(pool_k, pool_v, table)` may damage the pools first."""
    q, k, v, sinks = tensors(case)
    pools = layout(case, k, v)
    if spoil:
        spoil(*pools)
    return compute(case, q, pools, sinks, kernel)


def expected(case: Case) -> tuple[Any, Any]:
    """Returns (out, lse), computed in float64."""
    q, k, v, sinks = tensors(case)
    q64, k64, v64 = (
        q.double().numpy(),
        [x.double().numpy() for x in k],
        [x.double().numpy() for x in v],
    )
    out = np.zeros((len(case.rows), case.heads, case.d_v))
    lse = np.full((len(case.rows), case.heads), -np.inf)
    for t, (r, lo, hi) in enumerate(case.rows):
        for h in range(case.heads):
            g = h // (case.heads // case.kv_heads)
            s = k64[r][lo:hi, g] @ q64[t, h] * case.d_qk**-0.5
            if case.cap:
                s = case.cap * np.tanh(s / case.cap)
            top = max([sinks[h], *s]) if len(s) or case.sinks else 0.0
            weights = np.exp(s - top)
            total = weights.sum() + np.exp(sinks[h] - top)
            if total > 0:
                out[t, h] = weights @ v64[r][lo:hi, g] / total * case.v_scale
                lse[t, h] = np.log(total) + top
    return out, lse


def same(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return all(
        np.array_equal(x.view(np.int32), y.view(np.int32)) for x, y in zip(a, b, strict=True)
    )


MIXED = causal([700, 70, 1, 530], [40, 70, 1, 1])
VALUES = {
    "group 1": Case((700, 70, 1, 530), MIXED, 2, 2),
    "group 3": Case((700, 70, 1, 530), MIXED, 6, 2, 128, 128),
    "group 4": Case((700, 70, 1, 530), MIXED, 4, 1),
    "group 7": Case((700, 70, 1, 530), MIXED, 7, 1),
    "d_qk is not d_v": Case((700, 70, 1, 530), MIXED, 4, 2, 192, 128),
    "head size 8 past 16": Case((700, 70, 1, 530), MIXED, 4, 2, 72, 88),
    "latent": Case((600, 33), causal([600, 33], [3, 33]), 16, 1, 576, 512, latent=True),
    "latent bf16": Case(
        (600, 33), causal([600, 33], [3, 33]), 16, 1, 576, 512, torch.bfloat16, latent=True
    ),
    "window": Case((700, 70), causal([700, 70], [40, 70], window=33), 8, 2),
    "soft cap": Case((700, 70), causal([700, 70], [40, 70]), 8, 2, cap=5.0),
    "sinks": Case((700, 70), causal([700, 70], [40, 70]), 8, 2, sinks=True),
    "bf16": Case(
        (700, 70), causal([700, 70], [40, 70]), 8, 2, 128, 72, torch.bfloat16, v_scale=0.5
    ),
    "fp8": Case(
        (700, 70), causal([700, 70], [40, 70]), 8, 2, 72, 128, torch.float8_e4m3fn, v_scale=0.25
    ),
    "fp16": Case((700, 70), causal([700, 70], [40, 70]), 8, 2, 72, 128, torch.float16),
    "empty rows": Case((70, 5), ((0, 0, 0), (0, 9, 3), (0, 0, 70), (1, 5, 5)), 4, 2),
    "empty rows, sinks": Case(
        (70, 5), ((0, 0, 0), (0, 9, 3), (0, 0, 70), (1, 5, 5)), 4, 2, sinks=True
    ),
    "ranges apart": Case((300,), ((0, 0, 3), (0, 290, 300), (0, 100, 131)), 4, 2),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    case = VALUES[name]
    out, lse = run(case)
    out64, lse64 = expected(case)
    np.testing.assert_allclose(out, out64, atol=3e-6, rtol=2e-5)
    np.testing.assert_allclose(lse, lse64, atol=3e-6, rtol=2e-6)


@pytest.mark.parametrize("name", VALUES)
def test_bits_do_not_depend_on_blocks(name: str) -> None:
    whole = run(dataclasses.replace(VALUES[name], block=10**6))
    for block in (1, 3, 32):
        assert same(whole, run(dataclasses.replace(VALUES[name], block=block))), block


def test_bits_do_not_depend_on_threads() -> None:
    case = VALUES["group 3"]
    with limited(2):
        several = run(case)
    with limited(1):
        assert same(several, run(case))


@pytest.mark.parametrize("name", ["group 4", "window", "latent bf16", "ranges apart"])
def test_bits_do_not_depend_on_the_page_size(name: str) -> None:
    results = [run(dataclasses.replace(VALUES[name], page_size=page)) for page in (1, 2, 16, 64)]
    assert all(same(results[0], other) for other in results[1:])


def test_bits_of_a_row_do_not_depend_on_the_chunk() -> None:
    whole = Case((600,), causal([600], [600]), 8, 2, sinks=True)
    out, lse = run(whole)
    q, k, v, sinks = tensors(whole)
    for begin, end in ((0, 1), (63, 65), (500, 520), (511, 600), (599, 600)):
        part = dataclasses.replace(whole, rows=whole.rows[begin:end])
        assert same(
            (out[begin:end], lse[begin:end]), compute(part, q[begin:end], layout(part, k, v), sinks)
        ), (begin, end)


@pytest.mark.parametrize("length", [100, 128, 515, 640])
@pytest.mark.parametrize("listed", [1, 5, 70])
def test_a_listed_tail_has_the_bits_of_plain_pages(length: int, listed: int) -> None:
    """Lists begin in the middle of a tile and cross tiles (70 keys) and splits (515)."""
    rows = tuple((0, 0, length - i % 3) for i in range(6))
    for heads, kv_heads in ((4, 1), (2, 2), (6, 2)):
        plain = Case((length,), rows, heads, kv_heads)
        tree = dataclasses.replace(plain, tails=dict.fromkeys(range(6), length - listed))
        for block in (BLOCK, 1, 4):
            assert same(run(plain), run(dataclasses.replace(tree, block=block))), (heads, block)


def test_rows_with_and_without_a_tail_share_a_block_and_keep_their_bits() -> None:
    rows = tuple((0, 0, 200) for _ in range(4))
    plain = Case((200,), rows, 4, 2)
    spread = dataclasses.replace(plain, tails={1: 197, 3: 120})
    q, k, v, sinks = tensors(plain)
    pool_k, pool_v, table = layout(dataclasses.replace(spread, tails={}), k, v)
    tails = list(range(pool_k.shape[0], pool_k.shape[0] + 3 + 80))
    pool_k = torch.cat([pool_k, k[0][197:], k[0][120:]])
    pool_v = torch.cat([pool_v, v[0][197:], v[0][120:]])
    start, indptr = (
        np.array([NO_LIST, 197, NO_LIST, 120], np.int32),
        np.array([0, 0, 3, 3, 83], np.int32),
    )
    table = table._replace(start=start, tail_indptr=indptr, tail_slots=np.array(tails, np.int32))
    assert same(run(plain), compute(plain, q, (pool_k, pool_v, table), sinks))


def test_a_nan_reaches_the_rows_that_see_its_key_and_no_other_row() -> None:
    """In a key it reaches every column, in a value its own column; 0 * NaN must not carry it to a
    row that does not see it."""
    case = Case((200,), causal([200], [40]), 4, 2)
    clean = run(case)
    for which in (0, 1):

        def spoil(pool_k: Any, pool_v: Any, table: Table) -> None:
            slot = table.page_ids[180 // 16] * 16 + 180 % 16
            (pool_k, pool_v)[which][slot, 1, 3] = float("nan")  # noqa: B023

        for block in (1, 3, 40):
            out, lse = run(dataclasses.replace(case, block=block), spoil=spoil)
            assert same((out[:20], lse[:20]), (clean[0][:20], clean[1][:20]))
            assert same((out[:, :2], lse[:, :2]), (clean[0][:, :2], clean[1][:, :2]))
            hit = out[20:, 2:] if which == 0 else out[20:, 2:, 3]
            assert np.isnan(hit).all() and not (
                which == 1 and np.isnan(np.delete(out, 3, axis=2)).any()
            )


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize < 4])
def test_every_bit_pattern_of_a_narrow_format_loads_exactly(dtype: torch.dtype) -> None:
    """A row that sees one key returns its value: all finite patterns, subnormals included, and NaN
    as NaN."""
    count = 2 ** (8 * dtype.itemsize)
    bits = torch.arange(count, dtype=torch.int32).to(torch.uint16 if count > 256 else torch.uint8)
    pool = bits.view(dtype).reshape(-1, 1, 64)
    n = pool.shape[0]
    q, out, lse = torch.zeros(n, 1, 64), torch.empty(n, 1, 64), torch.empty(n, 1)
    position, plain = np.arange(n, dtype=np.int32), np.full(n, NO_LIST, np.int32)
    zeros = np.zeros(n + 1, np.int32)
    pages = (position, np.array([0, n], np.int32), zeros[:1], plain, zeros, zeros[:0])
    blocks = np.stack([zeros[:n], position, position + 1], 1)
    table = Table(*pages, lo=position, hi=position + 1, blocks=blocks)
    handle = bound(table, 1, 1, 64, 64, page_size=1, kv_dtype=DTYPES[dtype])
    layer = torch.tensor((0.0, 1.0, 1.0, -torch.inf))
    call(attend.compiled(), q, torch.zeros_like(pool), pool, out, lse, handle, layer)
    assert np.array_equal(out.numpy(), pool.float().numpy(), equal_nan=True)


def scalar(name: str) -> Any:
    """Returns an elementary function of the kernel that takes a float32 array."""
    f = njit(linked({**vars(attend.elementary), **vars(attend)}, {})[name].py_func)

    def each(x: Any) -> Any:
        return np.array([f(np.float32(v)) for v in x], np.float32)

    return each


def ulps(x: Any, truth: Any) -> float:
    return float(np.max(np.abs(x - truth) / np.spacing(np.abs(truth).astype(np.float32))))


def test_exp2_and_tanh_are_accurate_and_exact_where_the_order_needs_it() -> None:
    rng, exp2, tanh = np.random.default_rng(0), scalar("exp2"), scalar("tanh")
    x = rng.uniform(-126, 1, 20000).astype(np.float32)
    assert ulps(exp2(x), np.exp2(x.astype(np.float64))) <= 1
    assert exp2([0.0, -0.0, -np.inf, -126.0, -126.001, -1e30]).tolist() == [1, 1, 0, 2**-126, 0, 0]
    x = np.concatenate([rng.uniform(-12, 12, 10000), 10 ** rng.uniform(-30, 0, 10000)]).astype(
        np.float32
    )
    assert ulps(tanh(x), np.tanh(x.astype(np.float64))) <= 2
    assert tanh([0.0, 1e30, np.inf, -np.inf]).tolist() == [0, 1, 1, -1]
    assert np.isnan(exp2([np.nan])).all() and np.isnan(tanh([np.nan])).all()


def test_erf_is_accurate_and_exact_where_it_is_1() -> None:
    erf = scalar("erf")
    x = np.random.default_rng(0).uniform(-5, 5, 10000).astype(np.float32)
    x = np.concatenate([x, (10.0 ** np.arange(-30, 0)).astype(np.float32)])
    assert ulps(erf(x), np.array([math.erf(v) for v in x.tolist()])) <= 2
    assert erf([0.0, 4.0, np.inf, -np.inf]).tolist() == [0, 1, 1, -1]
    assert np.signbit(erf([-0.0])).all() and np.isnan(erf([np.nan])).all()


def exact_cos_sin(x: float) -> tuple[Decimal, Decimal]:
    """Returns cos and sin with 60 digits: x less the nearest multiple of pi/2, then the series."""
    with localcontext(prec=60):
        quarter = Decimal(
            "1.57079632679489661923132169163975144209858469968755291048747229615390820314310449931"
        )
        n = (Decimal(x) / quarter).to_integral_value()
        r = Decimal(x) - n * quarter
        terms = [Decimal(1)]
        for k in range(1, 50):
            terms.append(terms[-1] * r / k)
        cos = sum(
            (term * (-1) ** (k // 2) for k, term in enumerate(terms) if k % 2 == 0), Decimal(0)
        )
        sin = sum(
            (term * (-1) ** (k // 2) for k, term in enumerate(terms) if k % 2 == 1), Decimal(0)
        )
        return [(cos, sin), (-sin, cos), (-cos, -sin), (sin, -cos)][int(n) % 4]


def test_cos_and_sin_of_float32_numbers_are_accurate_up_to_the_largest_angle() -> None:
    """Also near multiples of pi/2, where all leading digits cancel."""
    pair = njit(elementary.cos_sin)
    rng = np.random.default_rng(0)
    multiples = np.arange(1, 300000) * (np.pi / 2)
    near = multiples[np.argsort(np.abs(multiples.astype(np.float32) - multiples))[:200]]
    angles = np.concatenate(
        [rng.uniform(0, 2**17, 300), 10 ** rng.uniform(-6, 8.7, 300), near, [order.LARGEST_ANGLE]]
    )
    for x in angles.astype(np.float32).astype(np.float64).tolist():
        (cos, sin), exact = pair(x), exact_cos_sin(x)
        for have, want in zip((cos, sin), exact, strict=True):
            assert abs(Decimal(have) - want) <= Decimal("1e-15") * abs(want), x
        assert pair(-x) == (cos, -sin)
    assert pair(0.0) == (1, 0) and np.isnan(pair(np.nan)).all()


def test_a_replaced_kernel_function_is_used_and_an_unknown_name_is_refused() -> None:
    case = Case((600,), causal([600], [2]), 2, 1)

    def split_begin(position: Any, split: Any) -> Any:
        return position // (split // 2) * (split // 2)

    other = run(case, attend.build(split_begin=split_begin))
    np.testing.assert_allclose(other[0], expected(case)[0], atol=3e-6)
    assert not same(other, run(case))
    with pytest.raises(KeyError, match="split_start"):
        attend.build(split_start=split_begin)
