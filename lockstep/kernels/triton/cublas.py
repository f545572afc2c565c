"""cuBLAS as a source of GEMMs: the call that torch makes, and cuBLASLt's own proposals among those
that do not split K.

Nothing here promises bits: `gemm_choice.py` compares whole outputs with our kernel's before any of
it is used. A proposal is a number in the list that the installed library returns for one shape; it
is found again, and compared again, at every load. Knows tensors and the library's C interface.
Called by `gemm_choice.py` and by the benchmark.
"""

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
class Call:
    """One proposal for one shape; holds what the library refers to."""

    blas: CublasLt
    parts: tuple[Any, ...]  # description, layouts of w, x and y
    proposal: Proposal
    rows: int

    def __call__(self, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """y = x wᵀ on the current stream."""
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        description, w_layout, x_layout, y_layout = self.parts
        out = ctypes.c_void_p(y.data_ptr())
        self.blas.call(
            "cublasLtMatmul", self.blas.handle, description, ctypes.byref(one), ctypes.c_void_p(w.data_ptr()), w_layout,
            ctypes.c_void_p(x.data_ptr()), x_layout, ctypes.byref(zero), out, y_layout, out, y_layout, ctypes.byref(self.proposal.algo),
            ctypes.c_void_p(self.blas.workspace.data_ptr()), ctypes.c_size_t(self.blas.workspace.numel()),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        return y


class CublasLt:
    """The library, opened once."""

    def __init__(self, workspace_bytes: int = 32 << 20) -> None:
        self.library = open_library()
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device="cuda")
        self.handle = self.make("cublasLtCreate")

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

    def layout(self, kind: int, k: int, rows: int) -> ctypes.c_void_p:
        """A contiguous [rows, k], which the library reads as k by rows, columns first."""
        return self.make(
            "cublasLtMatrixLayoutCreate",
            kind,
            ctypes.c_uint64(k),
            ctypes.c_uint64(rows),
            ctypes.c_int64(k),
        )

    def proposals(self, n: int, k: int, rows: int, dtype: torch.dtype, count: int) -> list[Call]:
        """At most `count` ways to compute y [rows, n] = x wᵀ without splitting K, the library's
        favourite first."""
        kind = DTYPES[dtype]
        description = self.make("cublasLtMatmulDescCreate", COMPUTE_32F, REAL_32F)
        transposed = ctypes.c_int32(1)
        self.call(
            "cublasLtMatmulDescSetAttribute",
            description,
            TRANS_A,
            ctypes.byref(transposed),
            ctypes.c_size_t(4),
        )
        w_layout, x_layout, y_layout = (
            self.layout(kind, k, n),
            self.layout(kind, k, rows),
            self.layout(kind, n, rows),
        )
        preference = self.make("cublasLtMatmulPreferenceCreate")
        room, mask = ctypes.c_uint64(self.workspace.numel()), ctypes.c_uint32(0)
        for attribute, value, size in ((WORKSPACE_BYTES, room, 8), (REDUCTION_MASK, mask, 4)):
            self.call(
                "cublasLtMatmulPreferenceSetAttribute",
                preference,
                attribute,
                ctypes.byref(value),
                ctypes.c_size_t(size),
            )
        found, returned = (Proposal * count)(), ctypes.c_int(0)
        shape = (description, w_layout, x_layout, y_layout, y_layout)
        self.call(
            "cublasLtMatmulAlgoGetHeuristic",
            self.handle,
            *shape,
            preference,
            count,
            found,
            ctypes.byref(returned),
        )
        self.call("cublasLtMatmulPreferenceDestroy", preference)
        return [
            Call(self, shape[:4], found[i], rows)
            for i in range(returned.value)
            if found[i].state == 0
        ]


def open_library() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded, or the system's."""
    torch.cuda.current_device()  # torch loads the library with the device
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuleError("cuBLASLt can be opened", f"none of {LIBRARIES}", "Use `--gemm own`")
