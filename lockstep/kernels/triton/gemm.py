"""GEMM in the canonical order: y = x Wᵀ, K walked in ascending steps of 16 into one float32
accumulator, one rounding at the end.

`Tile` is what may be chosen freely: it changes speed, never bits. N and K are compiled in, the rows
are a run-time value, so a lone request has the same binary as a full batch. A bias is not fused
(cuBLAS would round it otherwise): `rowwise.add_bias` adds it. The walk over K is stated once, in
`product`, which `moe.py` calls too. Knows tensors; knows no layers and no table. Called by
`gemm_choice.py`, by the op table, by the tests and by the benchmark.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lockstep.types import RuleError


@dataclass(frozen=True)
class Tile:
    """The launch shape of one GEMM variant."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8  # row tiles that share a column tile's weights while those are in the L2

    @property
    def name(self) -> str:
        """Short: rows x columns x depth, warps, stages, group."""
        shape = f"{self.rows}x{self.columns}x{self.depth}"
        return f"t{shape}w{self.warps}s{self.stages}g{self.group}"

    @property
    def constants(self) -> dict[str, Any]:
        """As every GEMM kernel takes it."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": False,
        }


@triton.jit
def weight_rows(w, first, column, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to rows first + column of w [.., K]; columns past N read the last one."""
    if N % COLUMNS != 0:
        column = tl.minimum(column, N - 1)
    return w + (first + column.to(tl.int64)) * K


@triton.jit
def product(x_row, w_row, there, K: tl.constexpr, DEPTH: tl.constexpr):
    """float32 [rows, columns] of rows at x_row [rows], zeros where not `there`, and at w_row
    [columns]: K in ascending steps."""
    k = tl.arange(0, DEPTH)
    x_at = x_row[:, None] + k[None, :]
    w_at = w_row[None, :] + k[:, None]
    total = tl.zeros((x_row.shape[0], w_row.shape[0]), tl.float32)
    for _ in range(0, K // DEPTH):
        total = tl.dot(tl.load(x_at, mask=there[:, None], other=0.0), tl.load(w_at), total)
        x_at += DEPTH
        w_at += DEPTH
    if K % DEPTH != 0:
        inside = k < K % DEPTH
        a = tl.load(x_at, mask=there[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, tl.load(w_at, mask=inside[:, None], other=0.0), total)
    return total


@triton.jit
def tile_at(index, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Which tile is computed `index`-th: GROUP row tiles of one column tile, then the next column
    tile."""
    per_group = GROUP * column_tiles
    first = (index // per_group) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    within = index % per_group
    return first + within % size, within // size


@triton.jit(do_not_specialize=["rows"])
def gemm_kernel(x, w, y, rows, x_stride, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """One tile of y [rows, N]. x [rows, K] at x_stride * 8 elements a row, w [N, K] and y
    contiguous."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(N, COLUMNS)
    row_tile, column_tile = tile_at(tl.program_id(0), row_tiles, column_tiles, GROUP)
    row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    w_row = weight_rows(w, 0, column, N, K, COLUMNS)
    total = product(x + row * x_stride * 8, w_row, there, K, DEPTH)
    at = row[:, None] * N + column[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=there[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["rows"])
def batched_gemm_kernel(x, w, y, rows, x_stride, x_batch, y_stride, y_batch, N: tl.constexpr,
                        K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                        DEPTH: tl.constexpr):  # fmt: skip
    """One tile of y[:, b] = x[:, b] · w[b], w [batch, N, K] contiguous; strides of x and y in units
    of 8 elements."""
    batch = tl.program_id(1).to(tl.int64)
    columns = tl.cdiv(N, COLUMNS)
    row = (tl.program_id(0) // columns * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(0) % columns * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    x_row = x + batch * x_batch * 8 + row * x_stride * 8
    w_row = weight_rows(w, batch * N, column, N, K, COLUMNS)
    total = product(x_row, w_row, there, K, DEPTH)
    at = batch * y_batch * 8 + row[:, None] * y_stride * 8 + column[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=there[:, None] & (column < N)[None, :])


def require(held: bool, rule: str, *tensors: Tensor) -> None:
    """Raises with the shape, strides and dtype of every tensor if a rule does not hold."""
    if not held:
        got = ", ".join(f"{t.dtype} {tuple(t.shape)} strides {t.stride()}" for t in tensors)
        raise RuleError(rule, got, "Pass such tensors")


def row_stride(x: Tensor, name: str) -> int:
    """The row stride of [rows, n] in units of 8 elements, as the kernels take it: 16-byte loads are
    then always aligned."""
    held = x.ndim == 2 and x.stride(1) == 1 and (x.stride(0) % 8 == 0 or x.shape[0] <= 1)
    require(held, f"{name} has contiguous rows at multiples of 8 elements", x)
    return x.stride(0) // 8


def gemm(x: Tensor, w: Tensor, y: Tensor, tile: Tile) -> Tensor:
    """y [rows, N] = x [rows, K] · w [N, K] transposed, by our kernel with that tile. Returns y."""
    (rows, k), n = x.shape, w.shape[0]
    fits = k == w.shape[1] and y.shape == (rows, n) and x.dtype == w.dtype == y.dtype
    rule = "x [rows, K], w [N, K] and y [rows, N] have one K, N and dtype; w and y are contiguous"
    require(fits and w.is_contiguous() and y.is_contiguous(), rule, x, w, y)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns),)
    operands = (x, w, y, rows, row_stride(x, "x"))
    gemm_kernel[grid](*operands, N=n, K=k, GROUP=tile.group, **tile.constants)
    return y


def batched_gemm(x: Tensor, w: Tensor, y: Tensor, tile: Tile) -> Tensor:
    """y[:, b] [rows, N] = x[:, b] [rows, K] · w[b] [N, K] transposed, for every b: x [rows, batch,
    K], y [rows, batch, N]. Returns y."""
    (rows, batch, k), n = x.shape, w.shape[1]
    fits = w.shape == (batch, n, k) and y.shape == (rows, batch, n)
    alike = x.dtype == w.dtype == y.dtype
    rule = "x [rows, batch, K], w [batch, N, K] and y [rows, batch, N] match, w is contiguous"
    require(fits and alike and w.is_contiguous(), rule, x, w, y)
    strides = (*x.stride()[:2], *y.stride()[:2])
    held = x.stride(2) == y.stride(2) == 1 and not any(stride % 8 for stride in strides)
    require(held, "x and y have contiguous rows at multiples of 8 elements", x, y)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns), batch)
    operands = (x, w, y, rows, *(stride // 8 for stride in strides))
    batched_gemm_kernel[grid](*operands, N=n, K=k, **tile.constants)
    return y
