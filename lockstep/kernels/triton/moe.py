"""Mixture of experts on the GPU without host synchronisation: router, choice of experts, grouped
GEMM, combination in slot order. No atomics.

The router multiplies and adds in float32, in lanes; equal scores go to the smaller expert id. A
pair is (token, slot), numbered token * k + slot. Pairs are listed expert by expert, ascending. No
tile has rows of two experts, so a row's bits depend on its own expert and nothing else. Grids are
upper bounds that follow from shapes: programs without a tile return at once. The CPU's counterpart
is `kernels/cpu/routing.py`. Called by the op table.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.gemm import Tile, product, require, row_stride, weight_rows
from lockstep.kernels.triton.rowwise import act, row_sum, tree_sum, width
from lockstep.ops import Routing

LOG2E = tl.constexpr(1.4426950408889634)
LANES = tl.constexpr(512)  # partial sums of a router's dot product
CHUNK = tl.constexpr(1024)  # pairs that are listed at a time
FEW = {"ROWS": 1, "COLUMNS": 2, "num_warps": 4}  # rows and experts per program of the router
MANY = {"ROWS": 4, "COLUMNS": 8, "num_warps": 8}


# ---- kernels ----


@triton.jit(do_not_specialize=["rows"])
def router_kernel(x, w, y, rows, x_stride, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    """Computes y [rows, N] float32 = x [rows, K] · w [N, K]ᵀ float32: lane i adds the products of
    columns i, i + LANES, ... in order, each by one fma; then `tree_sum` adds the lanes."""
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
    sums = tl.reshape(tree_sum(lanes), [ROWS, COLUMNS])
    at = y + row[:, None] * N + column[None, :]
    tl.store(at, sums, mask=(row < rows)[:, None] & (column < N)[None, :])


@triton.jit
def first_best(value, taken, index):
    """Returns the largest value that is not taken, and the smallest index that has it."""
    top = tl.max(tl.where(taken, float("-inf"), value), 0)
    return top, tl.min(tl.where((value == top) & (taken == 0), index, value.shape[0]), 0)


@triton.jit
def limit_groups(ranked, expert, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
                 PAIRS: tl.constexpr):  # fmt: skip
    """Sets experts outside of the best KEEP groups to -inf. A group counts by its best expert or,
    with PAIRS, by the sum of its best two."""
    group = expert // (EXPERTS // GROUPS)
    index = tl.arange(0, width(GROUPS))
    tops = tl.full([width(GROUPS)], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        outside = (group != g) | (expert >= EXPERTS)
        top, best = first_best(ranked, outside, expert)
        if PAIRS:
            second, _ = first_best(ranked, outside | (expert == best), expert)
            top += second
        tops = tl.where(index == g, top, tops)
    closed = index >= GROUPS
    kept = expert < 0
    for _ in tl.static_range(KEEP):
        _, best = first_best(tops, closed, index)
        closed = closed | (index == best)
        kept = kept | (group == best)
    return tl.where(kept, ranked, float("-inf"))


@triton.jit
def exp_shares(value, inside):
    """Returns the softmax of a vector; zero where not `inside`."""
    top = tl.max(tl.where(inside, value, float("-inf")), 0)
    e = tl.where(inside, tl.exp2((value - top) * LOG2E), 0.0)
    return tl.div_rn(e, row_sum(e) + tl.zeros_like(e))


@triton.jit
def route_kernel(logits, bias, ids, weights, floor, scale, EXPERTS: tl.constexpr, K: tl.constexpr,
                 SCORE: tl.constexpr, NORM: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
                 PAIRS: tl.constexpr):  # fmt: skip
    """Writes ids and weights of one token's K experts, best first. The bias may be None."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, width(EXPERTS))
    inside = expert < EXPERTS
    scores = tl.load(logits + token * EXPERTS + expert, mask=inside, other=0.0)
    if SCORE == "softmax":
        scores = exp_shares(scores, inside)
    elif SCORE == "sigmoid":
        scores = act(scores, 0.0, "sigmoid")
    ranked = scores
    if bias is not None:
        ranked += tl.load(bias + expert, mask=inside, other=0.0)
    if GROUPS > 1:
        ranked = limit_groups(ranked, expert, EXPERTS, GROUPS, KEEP, PAIRS)
    taken = expert >= EXPERTS
    slot = tl.arange(0, width(K))
    chosen = tl.zeros([width(K)], tl.int32)
    value = tl.zeros([width(K)], tl.float32)
    for nth in tl.static_range(K):
        _, best = first_best(ranked, taken, expert)
        best = tl.minimum(best, EXPERTS - 1)  # a row of NaN has no best: NaN weights, valid ids
        taken = taken | (expert == best)
        chosen = tl.where(slot == nth, best, chosen)
        own = tl.sum(tl.where(expert == best, scores, 0.0), 0)  # one score plus zeros: exact
        value = tl.where(slot == nth, own, value)
    if SCORE == "chosen":
        value = exp_shares(value, slot < K)
    if NORM:
        total = row_sum(tl.where(slot < K, value, 0.0)) + floor
        value = tl.div_rn(value, total + tl.zeros_like(value))
    tl.store(ids + token * K + slot, chosen, mask=slot < K)
    tl.store(weights + token * K + slot, value * scale, mask=slot < K)


@triton.jit(do_not_specialize=["pairs"])
def list_kernel(ids, counts, listed, pairs):
    """Writes one expert's pairs, ascending, after those of smaller experts, and their count."""
    expert = tl.program_id(0)
    before = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        before += (tl.load(ids + pair, mask=pair < pairs, other=expert) < expert).to(tl.int32)
    first = tl.sum(before, 0)
    at = first
    for begin in range(0, pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        hit = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        tl.store(listed + at + tl.cumsum(hit.to(tl.int32), 0) - 1, pair, mask=hit)
        at += tl.sum(hit.to(tl.int32), 0)
    tl.store(counts + expert, at - first)


@triton.jit
def grouped_gemm_kernel(x, w, bias, y, counts, listed, x_stride, EXPERTS: tl.constexpr,
                        N: tl.constexpr, K: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr,
                        COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Computes y [pairs, N]: row x[pair // PER_ROW] times its expert's w [N, K]ᵀ; a bias, if any,
    is a second rounding."""
    tile = tl.program_id(0)
    index = tl.arange(0, width(EXPERTS))
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
        total = product(x_row, w_row, there, K, DEPTH)
        value = total.to(y.dtype.element_ty)
        if bias is not None:
            offset = tl.load(bias + expert * N + column, mask=column < N, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) + offset[None, :]).to(y.dtype.element_ty)
        at = y + pair.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(at, value, mask=there[:, None] & (column < N)[None, :])


@triton.jit
def combine_kernel(parts, weights, y, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Computes a row: parts times their weights, added in slot order in float32, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    total = tl.zeros([COLUMNS], tl.float32)
    for slot in tl.static_range(K):
        part = tl.load(parts + (token * K + slot) * N + column, mask=inside, other=0.0)
        total += part.to(tl.float32) * tl.load(weights + token * K + slot)
    tl.store(y + token * N + column, total.to(y.dtype.element_ty), mask=inside)


# ---- calls ----


class Routes(NamedTuple):
    """The experts of each row, best first, and the pairs listed by expert."""

    ids: Tensor  # int32 [t, k]
    weights: Tensor  # float32 [t, k]
    counts: Tensor  # int32 [experts]
    pairs: Tensor  # int32 [t * k]


def router(x: Tensor, w: Tensor) -> Tensor:
    """Returns logits float32 [rows, experts] = x [rows, K] · w [experts, K]ᵀ, w float32."""
    (rows, k), n = x.shape, w.shape[0]
    y = w.new_empty(rows, n)
    shape = FEW if rows <= 64 else MANY  # the same bits
    grid = (triton.cdiv(rows, shape["ROWS"]), triton.cdiv(n, shape["COLUMNS"]))
    operands = (x, w, y, rows, row_stride(x, "x"))
    router_kernel[grid](*operands, N=n, K=k, enable_fp_fusion=False, **shape)
    return y


def route(logits: Tensor, routing: Routing, correction: Tensor | None) -> Routes:
    """Chooses experts from logits float32 [t, experts] and lists their pairs: two launches. A
    correction changes which experts are chosen, but not their weights."""
    t, experts = logits.shape
    held = experts == routing.experts and logits.dtype == torch.float32 and logits.is_contiguous()
    require(held, f"logits are contiguous float32 [tokens, {routing.experts}]", logits)
    ids = logits.new_empty(t, routing.k, dtype=torch.int32)
    weights = logits.new_empty(t, routing.k)
    pairs = correction is not None and experts > routing.groups
    route_kernel[(t,)](
        logits, correction, ids, weights, routing.floor, routing.scale, EXPERTS=experts,
        K=routing.k, SCORE=routing.score, NORM=routing.norm, GROUPS=routing.groups,
        KEEP=routing.keep, PAIRS=pairs, num_warps=1 + (experts > 256), enable_fp_fusion=False,
    )  # fmt: skip
    return listed(ids, weights, experts)


def listed(ids: Tensor, weights: Tensor, experts: int) -> Routes:
    """Lists pairs by expert: counts int32 [experts], pairs int32 [tokens * k]. One launch."""
    counts, pairs = ids.new_empty(experts), ids.new_empty(ids.numel())
    list_kernel[(experts,)](ids, counts, pairs, ids.numel(), num_warps=4)
    return Routes(ids, weights, counts, pairs)


def grouped_gemm(x: Tensor, w: Tensor, bias: Tensor | None, routes: Routes, tile: Tile) -> Tensor:
    """Returns y [pairs, N]: each pair's row of x times its expert's w [experts, N, K]. x has one
    row per token or one per pair."""
    (experts, n, k), pairs = w.shape, len(routes.pairs)
    fits = len(x) in (pairs, len(routes.ids)) and x.shape[1] == k
    rule = f"x has a row per token or per pair ({pairs}) and w's K columns; w is contiguous"
    require(fits and w.is_contiguous(), rule, x, w)
    y = x.new_empty(pairs, n)
    if pairs:
        tiles = triton.cdiv(pairs, tile.rows) + min(experts, pairs)
        shape = {"EXPERTS": experts, "N": n, "K": k, "PER_ROW": pairs // len(x)}
        operands = (x, w, bias, y, routes.counts, routes.pairs, row_stride(x, "x"))
        grid = (tiles, triton.cdiv(n, tile.columns))
        grouped_gemm_kernel[grid](*operands, **shape, **tile.constants)
    return y


def combine(parts: Tensor, routes: Routes) -> Tensor:
    """Returns [tokens, N]: parts [tokens * k, N] times their weights, added in slot order."""
    (tokens, k), n = routes.weights.shape, parts.shape[1]
    y = parts.new_empty(tokens, n)
    shape = {"N": n, "K": k, "COLUMNS": 1024, "num_warps": 4, "enable_fp_fusion": False}
    combine_kernel[(tokens, triton.cdiv(n, 1024))](parts, routes.weights, y, **shape)
    return y
