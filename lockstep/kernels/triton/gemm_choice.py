"""Chooses the implementation of a GEMM per (N, K, rows): our tile from the committed table, or
cuBLAS if its whole output has our bits on this machine, for row counts of a finite grid only.
`choose` runs at load: if a tile of ours differs, the machine is refused; if a library call differs,
it is not used. cuBLAS means torch's own call, or cuBLASLt's proposals that do not split K, queried
at every load."""

import ctypes
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.triton.gemm import Tile, gemm
from lockstep.types import RuleError

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)  # rows of a step
LIBRARY_ROWS = 128  # from this many rows, shapes that were never measured try the library
ALIGNMENT = 256  # bytes; the alignment of torch's allocations
REFERENCE = Tile(rows=64, columns=64, depth=64, warps=4, stages=4)
TABLE = Path(__file__).with_name("gemm_table.json")
# "NxK" → rows → our tile's name and, if it was faster, the name of the library's call
MEASURED: dict[str, dict[str, list[str]]] = json.loads(TABLE.read_text())["sm_90"]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x [rows, K], w [N, K], y [rows, N]) → y
Library = Callable[[str, Tensor, int], Call | None]  # (name, w, rows) → the call, if any
Choices = dict[int, Call]  # of one weight shape: row count → the library call used for it

COMPUTE_32F, REAL_32F, REAL_16BF, REAL_16F = 68, 0, 14, 2  # cublasComputeType_t, cudaDataType_t
TRANS_A, WORKSPACE_BYTES, REDUCTION_MASK = 3, 1, 3  # cublasLt attribute numbers
DTYPES = {torch.bfloat16: REAL_16BF, torch.float16: REAL_16F}
PROPOSALS = 6  # requested per shape
ROOM = 32 << 20  # bytes of workspace


def multiply(choices: Choices, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Computes y [rows, N] = x [rows, K] · w [N, K]ᵀ, by our tile for row counts without a library
    call, with the same bits. More rows than the grid's largest are computed in chunks of that."""
    if len(x) > GRID[-1]:
        for i in range(0, len(x), GRID[-1]):
            multiply(choices, x[i : i + GRID[-1]], w, y[i : i + GRID[-1]])
        return y
    call, (n, k) = choices.get(len(x)), w.shape
    if call is not None and placed_alike(x, w, y):
        return call(x, w, y)
    return gemm(x, w, y, tile_for(n, k, GRID[bisect_left(GRID, len(x))]))


def placed_alike(*tensors: Tensor) -> bool:
    """Returns whether tensors have the strides and alignment of those in `choose`: for others a
    library may run another kernel."""
    return all(t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 for t in tensors)


@cache
def tile_for(n: int, k: int, rows: int) -> Tile:
    """Returns the table's tile or, for an unmeasured shape, one by rule; no bit depends on it."""
    measured = MEASURED.get(f"{n}x{k}", {}).get(str(rows))
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
    """Returns the library call's name to try, or None where our tile was measured faster."""
    measured = MEASURED.get(f"{n}x{k}", {}).get(str(rows))
    if measured is not None:
        return next(iter(measured[1:]), None)
    return "cublas" if rows >= LIBRARY_ROWS else None


def differing(a: Tensor, b: Tensor) -> int:
    """Counts the elements whose bits differ, 1,024 rows at a time."""
    a, b = a.view(torch.int16), b.view(torch.int16)
    return sum(int((a[i : i + 1024] != b[i : i + 1024]).sum()) for i in range(0, len(a), 1024))


def sample_rows(count: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns x [count, k] in which every other row has exponents spread over many binades, so that
    a different order of additions changes bits."""
    generator = torch.Generator(device).manual_seed(count + k)
    x = torch.randn(count, k, generator=generator, device=device)
    exponents = torch.randint(-6, 7, x[1::2].shape, generator=generator, device=device)
    x[1::2] *= torch.exp2(exponents.float())
    return x.to(dtype)


def output_of(call: Call, x: Tensor, w: Tensor) -> Tensor:
    """Returns the output of a call into memory filled with NaN."""
    return call(x, w, x.new_full((len(x), len(w)), float("nan")))


def choose(w: Tensor, library: Library, grid: Sequence[int] = GRID) -> Choices:
    """Returns, for a weight's shape and dtype, the library calls for row counts where the library
    is preferred and its whole output has our bits. Raises RuleError if two of our tiles differ."""
    found, (n, k) = Choices(), w.shape
    all_rows = sample_rows(max(grid), k, w.dtype, w.device)
    wanted = output_of(partial(gemm, tile=REFERENCE), all_rows, w)
    for rows in grid:
        x, want = all_rows[:rows], wanted[:rows]
        tile, name = tile_for(n, k, rows), library_for(n, k, rows)
        wrong = differing(output_of(partial(gemm, tile=tile), x, w), want)
        if wrong:
            got = f"{wrong} of {rows * n} elements of {n}x{k} with {rows} rows, {tile.name}"
            remedy = "Use device cpu: this GPU does not compute in the order of sm_90"
            raise RuleError("a GEMM's bits do not depend on its tile", got, remedy)
        call = library(name, w, rows) if name else None
        if call is not None and not differing(output_of(call, x, w), want):
            found[rows] = call
    return found


# ---- cuBLAS ----


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def torch_gemm(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Computes y = x wᵀ by torch, which calls cuBLAS."""
    return torch.mm(x, w.t(), out=y)


class CublasLt:
    """The cublasLt library that torch is linked with."""

    def __init__(self) -> None:
        self.workspace = torch.empty(ROOM, dtype=torch.uint8, device="cuda")
        self.library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
        self.handle = self.make("cublasLtCreate")
        self.description = self.make("cublasLtMatmulDescCreate", COMPUTE_32F, REAL_32F)
        self.set("Desc", self.description, TRANS_A, ctypes.c_int32(1))
        self.preference = self.make("cublasLtMatmulPreferenceCreate")
        self.set("Preference", self.preference, WORKSPACE_BYTES, ctypes.c_uint64(ROOM))
        self.set("Preference", self.preference, REDUCTION_MASK, ctypes.c_uint32(0))

    def __call__(self, name: str, w: Tensor, rows: int) -> Call | None:
        """Returns torch's call for "cublas"; for "lt3" the fourth proposal for `rows`, if any."""
        return torch_gemm if name == "cublas" else self.proposals(w, rows).get(name)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library; raises RuleError if it does not succeed."""
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuleError(f"{name} succeeds", f"status {status}", "Check torch and the driver")

    def make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Calls a constructor of the library; returns the object's handle."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made

    def set(self, what: str, owner: ctypes.c_void_p, attribute: int, value: Any) -> None:
        """Sets an attribute of a description or a preference."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self.call(f"cublasLtMatmul{what}SetAttribute", owner, attribute, ctypes.byref(value), size)

    def proposals(self, w: Tensor, rows: int) -> dict[str, Call]:
        """Returns calls by name that compute y [rows, N] = x wᵀ without splitting K, in the order
        of the library's preference."""
        layouts, (n, k) = [], w.shape
        for height, length in ((n, k), (rows, k), (rows, n)):  # row-major, so transposed
            sizes = (ctypes.c_uint64(length), ctypes.c_uint64(height), ctypes.c_int64(length))
            layouts.append(self.make("cublasLtMatrixLayoutCreate", DTYPES[w.dtype], *sizes))
        found, returned = (Proposal * PROPOSALS)(), ctypes.c_int(0)
        self.call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.description, *layouts, layouts[2],
            self.preference, PROPOSALS, found, ctypes.byref(returned),
        )  # fmt: skip
        usable = enumerate(each for each in found[: returned.value] if each.state == 0)
        return {f"lt{i}": partial(self.multiply, layouts, each.algo) for i, each in usable}

    def multiply(self, layouts: list[Any], algo: Any, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """Computes y = x wᵀ on the current stream, by one proposal for one shape."""
        w_layout, x_layout, y_layout = layouts
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        w_at, x_at, y_at, room = (ctypes.c_void_p(t.data_ptr()) for t in (w, x, y, self.workspace))
        self.call(
            "cublasLtMatmul", self.handle, self.description, ctypes.byref(one), w_at, w_layout,
            x_at, x_layout, ctypes.byref(zero), y_at, y_layout, y_at, y_layout, ctypes.byref(algo),
            room, ctypes.c_size_t(ROOM), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        return y
