"""Mixture of experts on the GPU without a word from the host: router, choice, grouped GEMM,
combination in slot order. No atomics.

The router multiplies and adds in float32, in lanes; equal scores go to the smaller expert id. A
pair is (token, slot), numbered token * k + slot. Pairs are listed expert by expert, ascending; an
expert's list fills whole tiles, and a tile's row knows its pair, so a row's bits depend on its own
expert and nothing else. Grids are upper bounds that follow from shapes: programs without a tile
leave. The CPU's twin is `kernels/cpu/routing.py`. Called by the op table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.gemm import Tile, product, require, row_stride, weight_rows
from lockstep.kernels.triton.rowwise import SIGMOID, act, tree_sum, width
from lockstep.ops import Routing

SOFTMAX, SIGMOIDS, CHOSEN = (tl.constexpr(score) for score in range(3))
SCORES = {"softmax": 0, "sigmoid": 1, "chosen": 2}
LOG2E = tl.constexpr(1.4426950408889634)
LANES = 512  # partial sums of a router's dot product
CHUNK = 1024  # pairs that are listed at a time


# ---- texts ----


@triton.jit(do_not_specialize=["rows"])
def router_kernel(x, w, y, rows, x_stride, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr):  # fmt: skip
    """y [rows, N] float32 = x [rows, K] · w [N, K] float32: lane i adds the products of columns i,
    i + LANES, ... in order, each by one fma; then the lanes are added, neighbours first."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_row = (x + row * x_stride * 8)[:, None, None]
    w_row = (w + column.to(tl.int64) * K)[None, :, None]
    there, real = (row < rows)[:, None, None], (column < N)[None, :, None]
    total = tl.zeros((ROWS, COLUMNS, LANES), tl.float32)
    for begin in range(0, K, LANES):
        k = (begin + tl.arange(0, LANES))[None, None, :]
        a = tl.load(x_row + k, mask=there & (k < K), other=0.0).to(tl.float32)
        b = tl.load(w_row + k, mask=real & (k < K), other=0.0)
        a, b = tl.broadcast(a, b)
        total = tl.fma(a, b, total)
    lanes = tl.reshape(total, [ROWS * COLUMNS, LANES])
    sums = tl.reshape(tree_sum(lanes, ROWS * COLUMNS, LANES, LEVELS), [ROWS, COLUMNS])
    at = y + row[:, None] * N + column[None, :]
    tl.store(at, sums, mask=(row < rows)[:, None] & (column < N)[None, :])


@triton.jit
def first_best(value, taken, index, WIDTH: tl.constexpr):
    """The largest value that is not taken, and the smallest index that has it."""
    top = tl.max(tl.where(taken, float("-inf"), value), 0)
    return top, tl.min(tl.where((value == top) & (taken == 0), index, WIDTH), 0)


@triton.jit
def limit_groups(ranked, expert, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
                 PAIRS: tl.constexpr, WIDTH: tl.constexpr, GROUP_WIDTH: tl.constexpr):  # fmt: skip
    """-inf for experts outside of the best KEEP groups; a group counts by its best expert, or by
    the sum of its best two."""
    group = expert // (EXPERTS // GROUPS)
    index = tl.arange(0, GROUP_WIDTH)
    tops = tl.full([GROUP_WIDTH], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        outside = (group != g) | (expert >= EXPERTS)
        top, best = first_best(ranked, outside, expert, WIDTH)
        if PAIRS:
            second, _ = first_best(ranked, outside | (expert == best), expert, WIDTH)
            top += second
        tops = tl.where(index == g, top, tops)
    closed = index >= GROUPS
    kept = expert < 0
    for _ in tl.static_range(KEEP):
        _, best = first_best(tops, closed, index, GROUP_WIDTH)
        closed = closed | (index == best)
        kept = kept | (group == best)
    return tl.where(kept, ranked, float("-inf"))


@triton.jit
def exp_shares(value, inside, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Softmax of a vector; zero where not inside."""
    top = tl.max(tl.where(inside, value, float("-inf")), 0)
    e = tl.where(inside, tl.exp2((value - top) * LOG2E), 0.0)
    return tl.div_rn(e, tree_sum(tl.reshape(e, [1, WIDTH]), 1, WIDTH, LEVELS) + tl.zeros_like(e))


@triton.jit
def route_kernel(logits, bias, ids, weights, floor, scale, EXPERTS: tl.constexpr, K: tl.constexpr,
                 SCORE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, GROUPS: tl.constexpr,
                 KEEP: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
                 K_WIDTH: tl.constexpr, K_LEVELS: tl.constexpr,
                 GROUP_WIDTH: tl.constexpr):  # fmt: skip
    """One token: ids and weights of its K experts, best first."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDTH)
    inside = expert < EXPERTS
    scores = tl.load(logits + token * EXPERTS + expert, mask=inside, other=0.0)
    if SCORE == SOFTMAX:
        scores = exp_shares(scores, inside, WIDTH, LEVELS)
    elif SCORE == SIGMOIDS:
        scores = act(scores, 0.0, SIGMOID)
    ranked = scores
    if BIAS:
        ranked += tl.load(bias + expert, mask=inside, other=0.0)
    if GROUPS > 1:
        ranked = limit_groups(ranked, expert, EXPERTS, GROUPS, KEEP, PAIRS, WIDTH, GROUP_WIDTH)
    taken = expert >= EXPERTS
    slot = tl.arange(0, K_WIDTH)
    chosen = tl.zeros([K_WIDTH], tl.int32)
    value = tl.zeros([K_WIDTH], tl.float32)
    for nth in tl.static_range(K):
        _, best = first_best(ranked, taken, expert, WIDTH)
        best = tl.minimum(best, EXPERTS - 1)  # a row of NaN has no best: NaN weights, real ids
        taken = taken | (expert == best)
        chosen = tl.where(slot == nth, best, chosen)
        own = tl.sum(tl.where(expert == best, scores, 0.0), 0)  # one, and zeros
        value = tl.where(slot == nth, own, value)
    if SCORE == CHOSEN:
        value = exp_shares(value, slot < K, K_WIDTH, K_LEVELS)
    if NORM:
        shares = tl.reshape(tl.where(slot < K, value, 0.0), [1, K_WIDTH])
        total = tree_sum(shares, 1, K_WIDTH, K_LEVELS) + floor
        value = tl.div_rn(value, total + tl.zeros_like(value))
    tl.store(ids + token * K + slot, chosen, mask=slot < K)
    tl.store(weights + token * K + slot, value * scale, mask=slot < K)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(ids, counts, pairs, CHUNK: tl.constexpr):
    """How many pairs an expert got."""
    expert = tl.program_id(0)
    total = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        total += (tl.load(ids + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["pairs"])
def list_kernel(
    ids, counts, listed, pairs, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    """An expert's pairs, ascending, behind those of the experts before it."""
    expert = tl.program_id(0)
    other = tl.arange(0, WIDTH)
    at = tl.sum(tl.load(counts + other, mask=other < expert, other=0), 0)
    for begin in range(0, pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        hit = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        tl.store(listed + at + tl.cumsum(hit.to(tl.int32), 0) - 1, pair, mask=hit)
        at += tl.sum(hit.to(tl.int32), 0)


@triton.jit
def grouped_gemm_kernel(x, w, bias, y, counts, listed, x_stride, EXPERTS: tl.constexpr,
                        N: tl.constexpr, K: tl.constexpr, PER_ROW: tl.constexpr, BIAS: tl.constexpr,
                        ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                        WIDTH: tl.constexpr):  # fmt: skip
    """y [pairs, N]: row x[pair // PER_ROW] times its expert's w [N, K]; a bias is a second
    rounding."""
    tile = tl.program_id(0)
    index = tl.arange(0, WIDTH)
    count = tl.load(counts + index, mask=index < EXPERTS, other=0)
    tiles = (count + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    if tile < tl.sum(tiles, 0):
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        first = (tile - tl.sum(tl.where(index < expert, tiles, 0), 0)) * ROWS
        begin = tl.sum(tl.where(index < expert, count, 0), 0)
        place = first + tl.arange(0, ROWS)
        there = place < tl.sum(tl.where(index == expert, count, 0), 0)
        pair = tl.load(listed + begin + place, mask=there, other=0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        x_row = x + (pair // PER_ROW).to(tl.int64) * x_stride * 8
        w_row = weight_rows(w, expert.to(tl.int64) * N, column, N, K, COLUMNS)
        total = product(x_row, w_row, there, K, ROWS, COLUMNS, DEPTH)
        value = total.to(y.dtype.element_ty)
        if BIAS:
            offset = tl.load(bias + expert * N + column, mask=column < N, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) + offset[None, :]).to(y.dtype.element_ty)
        at = y + pair.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(at, value, mask=there[:, None] & (column < N)[None, :])


@triton.jit
def combine_kernel(parts, weights, y, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """One row: its slots' rows times their weights, added in slot order in float32, rounded
    once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    total = tl.zeros([COLUMNS], tl.float32)
    for slot in tl.static_range(K):
        part = tl.load(parts + (token * K + slot) * N + column, mask=inside, other=0.0)
        total += part.to(tl.float32) * tl.load(weights + token * K + slot)
    tl.store(y + token * N + column, total.to(y.dtype.element_ty), mask=inside)


# ---- calls ----


@dataclass(frozen=True, eq=False)
class Lists:
    """Pairs by expert: counts int32 [experts], pair numbers int32 [tokens * k]."""

    counts: Tensor
    pairs: Tensor
    k: int


def router(x: Tensor, w: Tensor) -> Tensor:
    """Logits float32 [rows, experts] = x [rows, K] · w [experts, K] float32, transposed."""
    (rows, k), n = x.shape, w.shape[0]
    y = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    if rows:
        launch = router_launch(rows)
        grid = (triton.cdiv(rows, launch["ROWS"]), triton.cdiv(n, launch["COLUMNS"]))
        router_kernel[grid](x, w, y, rows, row_stride(x, "x"), N=n, K=k, **launch)
    return y


def router_launch(rows: int) -> dict[str, Any]:
    """One row and few experts a program, or several of both; the same bits."""
    shape = {"ROWS": 1, "COLUMNS": 2} if rows <= 64 else {"ROWS": 4, "COLUMNS": 8}
    shape |= {"LANES": LANES, "LEVELS": LANES.bit_length() - 1}
    return shape | {"num_warps": 4 if rows <= 64 else 8, "enable_fp_fusion": False}


def route_launch(how: Routing, has_bias: bool) -> dict[str, Any]:
    """What `route_kernel` is compiled for."""
    wide, k_wide = width(how.experts), max(width(how.k), 2)
    return {
        "EXPERTS": how.experts,
        "K": how.k,
        "SCORE": SCORES[how.score],
        "BIAS": has_bias,
        "NORM": how.norm,
        "GROUPS": how.groups,
        "KEEP": how.keep,
        "PAIRS": has_bias and how.experts > how.groups,
        "WIDTH": wide,
        "LEVELS": wide.bit_length() - 1,
        "K_WIDTH": k_wide,
        "K_LEVELS": k_wide.bit_length() - 1,
        "GROUP_WIDTH": max(width(how.groups), 2),
        "num_warps": 1 if wide <= 256 else 2,
        "enable_fp_fusion": False,
    }


def route(logits: Tensor, how: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """ids int32 and weights float32, [tokens, k], best first. `bias` corrects what is chosen, not
    what it weighs."""
    held = logits.shape[1] == how.experts and logits.dtype == torch.float32
    rule = f"logits are contiguous float32 [tokens, {how.experts}]"
    require(held and logits.is_contiguous(), rule, logits)
    ids = torch.empty(len(logits), how.k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(len(logits), how.k, dtype=torch.float32, device=logits.device)
    if len(logits):
        operands = (logits, logits if bias is None else bias, ids, weights, how.floor, how.scale)
        route_kernel[(len(logits),)](*operands, **route_launch(how, bias is not None))
    return ids, weights


def list_pairs(ids: Tensor, experts: int) -> Lists:
    """Who computes what: two launches, nothing read back."""
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    pairs = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    count_kernel[(experts,)](ids, counts, ids.numel(), CHUNK=CHUNK, num_warps=4)
    list_kernel[(experts,)](
        ids, counts, pairs, ids.numel(), EXPERTS=experts, WIDTH=width(experts), CHUNK=CHUNK,
        num_warps=4,
    )  # fmt: skip
    return Lists(counts, pairs, ids.shape[1])


def grouped_gemm(x: Tensor, w: Tensor, bias: Tensor | None, lists: Lists, tile: Tile) -> Tensor:
    """y [pairs, N]: a pair's row of x times its expert's w [experts, N, K]. x has a row per token,
    or one per pair."""
    (experts, n, k), pairs = w.shape, len(lists.pairs)
    fits = len(x) in (pairs, pairs // lists.k) and x.shape[1] == k
    rule = f"x has a row per token or per pair ({pairs}), w is contiguous, both have one K"
    require(fits and w.is_contiguous(), rule, x, w)
    y = torch.empty(pairs, n, dtype=x.dtype, device=x.device)
    if pairs:
        tiles = triton.cdiv(pairs, tile.rows) + min(experts, pairs)
        grouped_gemm_kernel[(tiles, triton.cdiv(n, tile.columns))](
            x, w, w if bias is None else bias, y, lists.counts, lists.pairs, row_stride(x, "x"),
            EXPERTS=experts, N=n, K=k, PER_ROW=pairs // len(x), BIAS=bias is not None,
            WIDTH=width(experts), **tile.constants,
        )  # fmt: skip
    return y


def combine(parts: Tensor, weights: Tensor) -> Tensor:
    """[tokens, N]: parts [tokens * k, N] times weights [tokens, k], added in slot order."""
    (tokens, k), n = weights.shape, parts.shape[1]
    y = torch.empty(tokens, n, dtype=parts.dtype, device=parts.device)
    if tokens:
        combine_kernel[(tokens, triton.cdiv(n, 1024))](
            parts, weights, y, N=n, K=k, COLUMNS=1024, num_warps=4, enable_fp_fusion=False
        )
    return y
