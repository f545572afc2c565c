"""Who computes a GEMM: per (N, K, rows) our tile from the committed table, or cuBLAS where its
whole output is bit-equal to ours here.

Rows take the values of a finite grid and no other, since no range of rows can be certified by
samples. `choose` runs at load: one reference by one of our tiles over all rows of the grid, then
the tile of every number of rows and, from LIBRARY_ROWS on, the library, each compared whole. A tile
of ours that differs is an error of this machine; a library that differs is not used. Knows tensors,
the table and callables; knows no layers. Called when weights are loaded, by the tests and by the
benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.triton.gemm import Tile, gemm
from lockstep.types import RuleError

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)  # rows of a step
LIBRARY_ROWS = 128  # from here on the library is preferred where it is in the class
ALIGNMENT = 256  # bytes; what torch allocates is aligned so
REFERENCE = Tile(rows=64, columns=64, depth=64, warps=4, stages=4)
Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x [rows, K], w [N, K], y [rows, N]) → y


@dataclass(frozen=True, eq=False)
class GemmChoice:
    """What runs for one number of rows, and why. `library` is None where our tile runs."""

    tile: Tile
    reason: str
    library: Call | None = None

    @property
    def name(self) -> str:
        """ "cublas", or the tile's name."""
        return "cublas" if self.library else self.tile.name


@dataclass(frozen=True, eq=False)
class Gemm:
    """One weight shape's choices, rows → choice."""

    n: int
    k: int
    choices: dict[int, GemmChoice]

    def __call__(self, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """y [rows, N] = x [rows, K] · w [N, K] transposed; rows is a value of the grid."""
        choice = self.choices.get(len(x))
        if choice is None:
            raise RuleError(
                f"a GEMM has as many rows as the bucket grid allows: {tuple(self.choices)}",
                str(len(x)),
                "Pad the step to its bucket",
            )
        if choice.library is not None and placed_alike(x, w, y):
            return choice.library(x, w, y)
        return gemm(x, w, y, choice.tile)


def placed_alike(*tensors: Tensor) -> bool:
    """Whether tensors lie as those of `choose` did: a library may pick another kernel for other
    strides or alignment."""
    return all(t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 for t in tensors)


@cache
def table() -> dict[str, dict[str, Any]]:
    """The committed table: "NxK" → rows → the fields of a `Tile`."""
    parsed: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("gemm_table.json").read_text()
    )["sm_90"]
    return parsed


def tile_for(n: int, k: int, rows: int) -> Tile:
    """The table's tile, or the rule's for a shape that was never measured. Speed only: any tile
    gives the same bits."""
    measured = table().get(f"{n}x{k}", {}).get(str(rows))
    if measured is not None:
        return Tile(**measured)
    if rows <= 16:
        return Tile(16, 32, 256, 4, 6) if n <= 8192 else Tile(16, 64, 128, 4, 5)
    if rows <= 64:
        return Tile(64, 32, 128, 4, 8) if n <= 8192 else Tile(64, 64, 128, 4, 6)
    if rows * n <= 132 * 128 * 128:
        return Tile(128, 64, 64, 4, 6)
    return Tile(128, 128, 64, 8, 4)


def own(tile: Tile) -> Call:
    """Our kernel with that tile."""
    return lambda x, w, y: gemm(x, w, y, tile)


def differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ, counted a thousand rows at a time."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise RuleError(
            "two outputs have one shape and dtype",
            f"{tuple(a.shape)} {a.dtype}, {tuple(b.shape)} {b.dtype}",
            "Compare like with like",
        )
    total = 0
    for begin in range(0, len(a), 1024):
        end = min(begin + 1024, len(a))
        total += int((a[begin:end].view(torch.int16) != b[begin:end].view(torch.int16)).sum())
    return total


def sample_rows(count: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[count, k]: every other row has exponents spread over many binades, so that another order of
    sums shows."""
    generator = torch.Generator(device).manual_seed(count + k)
    x = torch.randn(count, k, generator=generator, device=device)
    x[1::2] *= torch.exp2(
        torch.randint(-6, 7, x[1::2].shape, generator=generator, device=device).float()
    )
    return x.to(dtype)


def whole(call: Call, x: Tensor, w: Tensor) -> Tensor:
    """The output of a call into poisoned room."""
    return call(x, w, torch.full((len(x), len(w)), float("nan"), dtype=x.dtype, device=x.device))


def choose(
    w: Tensor, library: Call | None, grid: Sequence[int] = GRID, prefer_from: int = LIBRARY_ROWS
) -> Gemm:
    """Choices for a weight's shape and dtype, by whole outputs on this machine."""
    n, k = w.shape
    x = sample_rows(max(grid), k, w.dtype, w.device)
    want = whole(own(REFERENCE), x, w)
    choices = {}
    for rows in grid:
        tile = tile_for(n, k, rows)
        wrong = differing(whole(own(tile), x[:rows], w), want[:rows])
        if wrong:
            got = f"{wrong} of {rows * n} elements of {n}x{k} with {rows} rows, {tile.name}"
            raise RuleError(
                "a GEMM's bits do not depend on its tile",
                got,
                "This device is not of the class sm_90: do not use it",
            )
        if library is None or rows < prefer_from:
            choices[rows] = GemmChoice(
                tile, "no library" if library is None else f"fewer than {prefer_from} rows"
            )
            continue
        differ = differing(whole(library, x[:rows], w), want[:rows])
        if differ:
            choices[rows] = GemmChoice(tile, f"cuBLAS differs in {differ} of {rows * n} elements")
        else:
            choices[rows] = GemmChoice(tile, f"all {rows * n} elements equal ours", library)
    return Gemm(n, k, choices)
