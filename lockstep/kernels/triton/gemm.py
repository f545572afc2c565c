"""GEMM in the canonical order: y = x Wᵀ, accumulated over K in ascending steps of 16 into one
float32 accumulator, rounded once at the end.

A `Tile` may be chosen freely: it changes speed, never bits. N and K are compile-time constants, the
number of rows is a run-time value, so a single request runs the same binary as a full batch. A bias
is not fused (cuBLAS would round it differently): `rowwise.add_bias` adds it. The loop over K is
written once, in `product`, which `moe.py` calls too. Knows tensors, but no layers and no table.
Called by `gemm_choice.py`, the op table, tests and benchmarks.
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
        """The tile as a string: t rows x columns x depth, w warps, s stages, g group."""
        shape = f"{self.rows}x{self.columns}x{self.depth}"
        return f"t{shape}w{self.warps}s{self.stages}g{self.group}"

    @property
    def constants(self) -> dict[str, Any]:
        """The keyword arguments that every GEMM kernel takes."""
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth} | options


@triton.jit
def weight_rows(w, first, column, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns pointers to rows first + column of w [.., K]; columns past N give the last one."""
    if N % COLUMNS != 0:
        column = tl.minimum(column, N - 1)
    return w + (first + column.to(tl.int64)) * K


@triton.jit
def product(x_row, w_row, there, K: tl.constexpr, DEPTH: tl.constexpr):
    """Multiplies rows at pointers x_row [rows], zeros where not `there`, by rows at w_row
    [columns], over K in ascending steps. Returns float32 [rows, columns]."""
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


@triton.jit(do_not_specialize=["rows"])
def gemm_kernel(x, w, y, rows, x_stride, N: tl.constexpr, K: tl.constexpr, BATCH: tl.constexpr,
                X_BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                DEPTH: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Computes one tile of y [rows, N] or of y[:, b] of [rows, BATCH, N], scheduled as GROUP row
    tiles of a column tile, then the next column tile. Strides of x: rows x_stride * 8 elements,
    batches X_BATCH * 8; w and y are contiguous."""
    if BATCH > 1:
        batch = tl.program_id(1).to(tl.int64)
        x += batch * X_BATCH * 8
        w += batch * N * K
        y += batch * N
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(N, COLUMNS)
    row_tile, column_tile = tl.swizzle2d(0, tl.program_id(0), row_tiles, column_tiles, GROUP)
    row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    w_row = weight_rows(w, 0, column, N, K, COLUMNS)
    total = product(x + row * x_stride * 8, w_row, there, K, DEPTH)
    at = row[:, None] * (BATCH * N) + column[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=there[:, None] & (column < N)[None, :])


def require(held: bool, rule: str, *tensors: Tensor) -> None:
    """Raises RuleError with dtype, shape and strides of every tensor if a rule is not met."""
    if not held:
        got = ", ".join(f"{t.dtype} {tuple(t.shape)} strides {t.stride()}" for t in tensors)
        raise RuleError(rule, got, "Pass tensors that meet this rule")


def row_stride(x: Tensor, name: str, axis: int = 0) -> int:
    """Returns the stride along an axis in units of 8 elements, as kernels take it, so that 16-byte
    loads are always aligned. Raises RuleError if it is no multiple of 8."""
    held = x.stride(-1) == 1 and (x.stride(axis) % 8 == 0 or x.shape[axis] <= 1)
    require(held, f"each row of {name} is contiguous and begins at a multiple of 8 elements", x)
    return x.stride(axis) // 8


def gemm(x: Tensor, w: Tensor, y: Tensor, tile: Tile) -> Tensor:
    """Computes y [rows, N] = x [rows, K] · w [N, K]ᵀ with our kernel; or, batched, the same for
    each b of x [rows, batch, K], w [batch, N, K], y [rows, batch, N]. Returns y."""
    (rows, *batch, k), n = x.shape, w.shape[-2]
    fits = w.shape == (*batch, n, k) and y.shape == (rows, *batch, n)
    alike = x.dtype == w.dtype == y.dtype
    rule = "x [rows, K], w [N, K], y [rows, N] have the same K, N and dtype; w and y are contiguous"
    require(fits and alike and w.is_contiguous() and y.is_contiguous(), rule, x, w, y)
    shape = {"N": n, "K": k, "BATCH": 1, "X_BATCH": 0, "GROUP": tile.group}
    if batch:
        shape |= {"BATCH": batch[0], "X_BATCH": row_stride(x, "x", 1)}
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns), *batch)
    gemm_kernel[grid](x, w, y, rows, row_stride(x, "x"), **shape, **tile.constants)
    return y
