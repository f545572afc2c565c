"""GEMM in the canonical order: y = x Wᵀ, K walked in ascending steps of 16 into one float32
accumulator, one rounding at the end.

`Tile` is what may be chosen freely: it changes speed, never bits. N and K are compiled in, the rows
are a run-time value, so a lone request has the same binary as a full batch. A bias is not fused
(cuBLAS would round it otherwise): `rowwise.add_bias` adds it. Knows tensors; knows no layers and no
table. Called by `gemm_choice.py`, by the tests and by the benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
    hopper: bool = False  # the warp-specialised kernel (`gemm_hopper.py`)

    @property
    def name(self) -> str:
        """Short: rows x columns x depth, warps, stages."""
        kind = "h" if self.hopper else "t"
        return (
            f"{kind}{self.rows}x{self.columns}x{self.depth}w{self.warps}s{self.stages}g{self.group}"
        )

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the ring, two bytes an element."""
        return (self.rows + self.columns) * self.depth * 2 * self.stages


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
def gemm_kernel(x, w, y, rows, x_stride, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                DEPTH: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """One tile of y [rows, N]. x [rows, K] at x_stride * 8 elements a row, w [N, K] and y
    contiguous."""
    row_tile, column_tile = tile_at(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(N, COLUMNS), GROUP
    )
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    there = (row < rows)[:, None]  # rows past the last are zeros, and cost no reading
    x_at = x + row.to(tl.int64)[:, None] * x_stride * 8 + k[None, :]
    w_row = column
    if N % COLUMNS != 0:
        w_row = tl.minimum(column, N - 1)
    w_at = w + w_row.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, K // DEPTH):
        total = tl.dot(tl.load(x_at, mask=there, other=0.0), tl.load(w_at), total)
        x_at += DEPTH
        w_at += DEPTH
    if K % DEPTH != 0:
        inside = k < K % DEPTH
        a = tl.load(x_at, mask=there & inside[None, :], other=0.0)
        total = tl.dot(a, tl.load(w_at, mask=inside[:, None], other=0.0), total)
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=there & (column < N)[None, :])


@triton.jit(do_not_specialize=["rows"])
def batched_gemm_kernel(x, w, y, rows, x_stride, x_batch, y_stride, y_batch, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                        COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """One tile of y[:, b] = x[:, b] · w[b], w [batch, N, K] contiguous; strides of x and y in units
    of 8 elements."""
    batch = tl.program_id(1).to(tl.int64)
    columns = tl.cdiv(N, COLUMNS)
    row = tl.program_id(0) // columns * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % columns * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    there = (row < rows)[:, None]
    x_at = x + batch * x_batch * 8 + row.to(tl.int64)[:, None] * x_stride * 8 + k[None, :]
    w_row = column
    if N % COLUMNS != 0:
        w_row = tl.minimum(column, N - 1)
    w_at = w + (batch * N + w_row)[None, :] * K + k[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, K // DEPTH):
        total = tl.dot(tl.load(x_at, mask=there, other=0.0), tl.load(w_at), total)
        x_at += DEPTH
        w_at += DEPTH
    if K % DEPTH != 0:
        inside = k < K % DEPTH
        a = tl.load(x_at, mask=there & inside[None, :], other=0.0)
        total = tl.dot(a, tl.load(w_at, mask=inside[:, None], other=0.0), total)
    at = batch * y_batch * 8 + row.to(tl.int64)[:, None] * y_stride * 8 + column[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=there & (column < N)[None, :])


def batched_gemm(x: Tensor, w: Tensor, y: Tensor, tile: Tile) -> Tensor:
    """y[:, b] [rows, N] = x[:, b] [rows, K] · w[b] [N, K] transposed, for every b: x [rows, batch,
    K], y [rows, batch, N]. Returns y."""
    (rows, batch, k), n = x.shape, w.shape[1]
    if (
        w.shape != (batch, n, k)
        or y.shape != (rows, batch, n)
        or not w.is_contiguous()
        or not x.dtype == w.dtype == y.dtype
    ):
        got = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (x, w, y))
        raise RuleError(
            "x [rows, batch, K], w [batch, N, K] and y [rows, batch, N] match, w is contiguous",
            got,
            "Pass matching tensors",
        )
    for name, t in (("x", x), ("y", y)):
        if t.stride(2) != 1 or (t.stride(0) | t.stride(1)) % 8:
            raise RuleError(
                f"{name} has contiguous rows at multiples of 8 elements",
                f"strides {t.stride()}",
                "Make it contiguous",
            )
    if rows:
        batched_gemm_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns), batch)](
            x, w, y, rows, x.stride(0) // 8, x.stride(1) // 8, y.stride(0) // 8, y.stride(1) // 8, N=n, K=k,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def row_stride(x: Tensor, name: str) -> int:
    """The row stride of [rows, n] in units of 8 elements, as the kernels take it: 16-byte loads are
    then always aligned."""
    if x.ndim != 2 or x.stride(1) != 1 or (x.stride(0) % 8 and x.shape[0] > 1):
        rule = f"{name} has contiguous rows at multiples of 8 elements"
        raise RuleError(rule, f"shape {tuple(x.shape)}, strides {x.stride()}", "Make it contiguous")
    return x.stride(0) // 8


def check_shapes(x: Tensor, w: Tensor, y: Tensor) -> None:
    """x [rows, K], w [N, K], y [rows, N], one dtype."""
    if (
        x.shape[1] != w.shape[1]
        or y.shape != (x.shape[0], w.shape[0])
        or not x.dtype == w.dtype == y.dtype
    ):
        got = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (x, w, y))
        raise RuleError(
            "x [rows, K], w [N, K] and y [rows, N] have one K, N and dtype",
            got,
            "Pass matching tensors",
        )
    if not w.is_contiguous() or not y.is_contiguous():
        raise RuleError(
            "w and y are contiguous",
            f"strides {w.stride()} and {y.stride()}",
            "Make them contiguous",
        )


def constants(tile: Tile) -> dict[str, int]:
    """A tile as the plain kernel takes it."""
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "GROUP": tile.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": False,
    }


def gemm(x: Tensor, w: Tensor, y: Tensor, tile: Tile) -> Tensor:
    """y [rows, N] = x [rows, K] · w [N, K] transposed, by our kernel with that tile. Returns y."""
    check_shapes(x, w, y)
    stride = row_stride(x, "x")
    (rows, k), n = x.shape, w.shape[0]
    if rows == 0:
        return y
    if tile.hopper:
        from lockstep.kernels.triton.gemm_hopper import launch

        return launch(x, w, y, tile)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns),)
    gemm_kernel[grid](x, w, y, rows, stride, N=n, K=k, **constants(tile))
    return y


def warm(n: int, k: int, dtype: torch.dtype, tile: Tile) -> None:
    """Compiles what `gemm` would launch into Triton's cache; tensors of the CPU stand for the
    device's. Launches nothing."""
    x, w, y = (torch.empty(shape, dtype=dtype) for shape in ((16, k), (n, k), (16, n)))
    if tile.hopper:
        from lockstep.kernels.triton.gemm_hopper import arguments, gemm_hopper_kernel

        positional, named = arguments(x, w, y, tile)
        gemm_hopper_kernel.warmup(*positional, grid=(1,), **named)
        return
    gemm_kernel.warmup(x, w, y, 16, row_stride(x, "x"), N=n, K=k, grid=(1,), **constants(tile))
