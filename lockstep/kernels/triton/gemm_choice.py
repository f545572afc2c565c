"""Who computes a GEMM: per (N, K, rows) our tile from the committed table, or cuBLAS where its
whole output is bit-equal to ours here, for rows of a finite grid and no other. `choose` runs at
load: a tile of ours that differs is an error of this machine, a library that differs is not used.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from lockstep.kernels.triton.gemm import Tile, gemm, require
from lockstep.types import RuleError

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)  # rows of a step
LIBRARY_ROWS = 128  # from here on the library is preferred for shapes that were never measured
ALIGNMENT = 256  # bytes; what torch allocates is aligned so
REFERENCE = Tile(rows=64, columns=64, depth=64, warps=4, stages=4)
TABLE = Path(__file__).with_name("gemm_table.json")
Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x [rows, K], w [N, K], y [rows, N]) → y
Library = Callable[[str, Tensor, int], Call | None]  # (name, w, rows) → its call, if it has one


@dataclass(frozen=True, eq=False)
class GemmChoice:
    """What runs for one number of rows, and why. `library` is None where our tile runs."""

    tile: Tile
    name: str
    reason: str
    library: Call | None = None


Choices = dict[int, GemmChoice]  # of one weight shape, by rows


def multiply(choices: Choices, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """y [rows, N] = x [rows, K] · w [N, K] transposed. Rows that are no value of the grid are
    computed by our tile, whose bits are those of any other; more than the grid's most in turns."""
    if len(x) > GRID[-1]:
        for i in range(0, len(x), GRID[-1]):
            multiply(choices, x[i : i + GRID[-1]], w, y[i : i + GRID[-1]])
        return y
    choice, (n, k) = choices.get(len(x)), w.shape
    if choice is None:
        return gemm(x, w, y, tile_for(n, k, GRID[bisect_left(GRID, len(x))]))
    if choice.library is not None and placed_alike(x, w, y):
        return choice.library(x, w, y)
    return gemm(x, w, y, choice.tile)


def placed_alike(*tensors: Tensor) -> bool:
    """Whether tensors lie as those of `choose` did: a library may pick another kernel for other
    strides or alignment."""
    return all(t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 for t in tensors)


@cache
def table() -> dict[str, dict[str, list[str]]]:
    """The committed table: "NxK" → rows → our tile's name and, if it was faster, the library's
    call."""
    parsed: dict[str, dict[str, list[str]]] = json.loads(TABLE.read_text())["sm_90"]
    return parsed


def tile_for(n: int, k: int, rows: int) -> Tile:
    """The table's tile, or the rule's for a shape that was never measured. Speed only: any tile
    gives the same bits."""
    measured = table().get(f"{n}x{k}", {}).get(str(rows))
    if measured is not None:
        return Tile(*map(int, re.findall(r"\d+", measured[0])))
    if rows <= 16:
        return Tile(16, 32, 128, 4, 8) if n <= 8192 else Tile(16, 64, 128, 4, 5)
    if rows <= 64:
        return Tile(64, 32, 128, 4, 8) if n <= 8192 else Tile(64, 64, 128, 4, 6)
    if rows * n <= 132 * 64 * 64:
        return Tile(64, 64, 128, 4, 6)
    if rows * n <= 132 * 128 * 128:
        return Tile(128, 64, 64, 4, 6)
    return Tile(128, 128, 64, 8, 4)


def library_for(n: int, k: int, rows: int) -> str | None:
    """The library's call to compare, or None where ours was faster."""
    measured = table().get(f"{n}x{k}", {}).get(str(rows))
    if measured is not None:
        return measured[1] if len(measured) > 1 else None
    return "cublas" if rows >= LIBRARY_ROWS else None


def differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ, counted a thousand rows at a time."""
    alike = a.shape == b.shape and a.dtype == b.dtype
    require(alike, "two outputs have one shape and dtype", a, b)
    a, b = a.view(torch.int16), b.view(torch.int16)
    return sum(int((a[i : i + 1024] != b[i : i + 1024]).sum()) for i in range(0, len(a), 1024))


def sample_rows(count: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[count, k]: every other row has exponents spread over many binades, so that another order of
    sums shows."""
    generator = torch.Generator(device).manual_seed(count + k)
    x = torch.randn(count, k, generator=generator, device=device)
    exponents = torch.randint(-6, 7, x[1::2].shape, generator=generator, device=device)
    x[1::2] *= torch.exp2(exponents.float())
    return x.to(dtype)


def whole(call: Call, x: Tensor, w: Tensor) -> Tensor:
    """The output of a call into poisoned room."""
    return call(x, w, torch.full((len(x), len(w)), float("nan"), dtype=x.dtype, device=x.device))


def choose(w: Tensor, library: Library | None, grid: Sequence[int] = GRID) -> Choices:
    """Choices for a weight's shape and dtype, by whole outputs on this machine."""
    n, k = w.shape
    x = sample_rows(max(grid), k, w.dtype, w.device)
    want = whole(partial(gemm, tile=REFERENCE), x, w)
    choices = {}
    for rows in grid:
        tile = tile_for(n, k, rows)
        wrong = differing(whole(partial(gemm, tile=tile), x[:rows], w), want[:rows])
        if wrong:
            got = f"{wrong} of {rows * n} elements of {n}x{k} with {rows} rows, {tile.name}"
            remedy = "This device is not of the class sm_90: do not use it"
            raise RuleError("a GEMM's bits do not depend on its tile", got, remedy)
        name = library_for(n, k, rows)
        call = library(name, w, rows) if library and name else None
        choices[rows] = judged(tile, name, call, x[:rows], w, want[:rows])
    return choices


def judged(
    tile: Tile, name: str | None, call: Call | None, x: Tensor, w: Tensor, want: Tensor
) -> GemmChoice:
    """The library where it has a call and all its bits are ours; else our tile."""
    if name is None:
        return GemmChoice(tile, tile.name, "ours is faster")
    if call is None:
        return GemmChoice(tile, tile.name, f"the library has no {name}")
    differ = differing(whole(call, x, w), want)
    if differ:
        return GemmChoice(tile, tile.name, f"{name} differs in {differ} of {want.numel()} elements")
    return GemmChoice(tile, name, f"all {want.numel()} elements equal ours", call)
