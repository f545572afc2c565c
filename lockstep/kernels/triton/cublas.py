"""cuBLAS as a source of GEMMs: torch's own call, and cuBLASLt's proposals that do not split K,
found again at every load. It promises no bits: `gemm_choice.py` compares whole outputs before it
uses any of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.types import RuleError

LIBRARIES = ("libcublasLt.so.13", "libcublasLt.so.12")
COMPUTE_32F, REAL_32F, REAL_16BF, REAL_16F = 68, 0, 14, 2  # cublasComputeType_t, cudaDataType_t
TRANS_A, WORKSPACE_BYTES, REDUCTION_MASK = 3, 1, 3  # attributes of descriptions and preferences
DTYPES = {torch.bfloat16: REAL_16BF, torch.float16: REAL_16F}
PROPOSALS = 6  # that are asked for


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
    """What torch calls."""
    return torch.mm(x, w.t(), out=y)


@dataclass(frozen=True, eq=False)
class LtCall:
    """One proposal for one shape; holds what the library refers to."""

    blas: CublasLt
    description: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]  # of w, x and y
    proposal: Proposal

    def __call__(self, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """y = x wᵀ on the current stream."""
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        w_at, x_at, y_at = (ctypes.c_void_p(t.data_ptr()) for t in (w, x, y))
        w_layout, x_layout, y_layout = self.layouts
        room = self.blas.workspace
        self.blas.call(
            "cublasLtMatmul", self.blas.handle, self.description, ctypes.byref(one),
            w_at, w_layout, x_at, x_layout, ctypes.byref(zero), y_at, y_layout, y_at, y_layout,
            ctypes.byref(self.proposal.algo), ctypes.c_void_p(room.data_ptr()),
            ctypes.c_size_t(room.numel()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        return y


class CublasLt:
    """The library, opened once."""

    def __init__(self, workspace_bytes: int = 32 << 20) -> None:
        self.library = open_library()
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device="cuda")
        self.handle = self.make("cublasLtCreate")

    def __call__(self, name: str, w: Tensor, rows: int) -> Any:
        """ "cublas": torch's call; "lt3": the fourth proposal for rows of w [N, K], or None."""
        if name == "cublas":
            return torch_gemm
        n, k = w.shape
        found = dict(enumerate(self.proposals(n, k, rows, w.dtype)))
        return found.get(int(name.removeprefix("lt")))

    def call(self, name: str, *arguments: Any) -> None:
        """Calls, and raises what the library answers other than success."""
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuleError(f"{name} succeeds", f"status {status}", "Use `--gemm own`")

    def make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Calls a constructor."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made

    def set(self, what: str, owner: ctypes.c_void_p, attribute: int, value: Any) -> None:
        """Sets an attribute of a description or a preference."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self.call(f"cublasLtMatmul{what}SetAttribute", owner, attribute, ctypes.byref(value), size)

    def layout(self, kind: int, k: int, rows: int) -> ctypes.c_void_p:
        """A contiguous [rows, k], which the library reads as k by rows, columns first."""
        sizes = (ctypes.c_uint64(k), ctypes.c_uint64(rows), ctypes.c_int64(k))
        return self.make("cublasLtMatrixLayoutCreate", kind, *sizes)

    def proposals(self, n: int, k: int, rows: int, dtype: torch.dtype) -> list[LtCall]:
        """Ways to compute y [rows, n] = x wᵀ without splitting K, the library's favourite first."""
        description = self.make("cublasLtMatmulDescCreate", COMPUTE_32F, REAL_32F)
        self.set("Desc", description, TRANS_A, ctypes.c_int32(1))
        shapes = ((k, n), (k, rows), (n, rows))
        layouts = tuple(self.layout(DTYPES[dtype], *shape) for shape in shapes)
        preference = self.make("cublasLtMatmulPreferenceCreate")
        self.set("Preference", preference, WORKSPACE_BYTES, ctypes.c_uint64(self.workspace.numel()))
        self.set("Preference", preference, REDUCTION_MASK, ctypes.c_uint32(0))
        found, returned = (Proposal * PROPOSALS)(), ctypes.c_int(0)
        self.call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, description, *layouts, layouts[2],
            preference, PROPOSALS, found, ctypes.byref(returned),
        )  # fmt: skip
        self.call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [found[i] for i in range(returned.value) if found[i].state == 0]
        return [LtCall(self, description, layouts, proposal) for proposal in usable]


def open_library() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded, or the system's."""
    torch.cuda.current_device()  # torch loads the library with the device
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuleError("cuBLASLt can be opened", f"none of {LIBRARIES}", "Use `--gemm own`")
