"""cuBLAS as a source of GEMMs: torch's own call, and cuBLASLt's proposals that do not split K,
found again at every load. It promises no bits: `gemm_choice.py` compares whole outputs before it
uses any of it."""

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.types import RuleError

LIBRARIES = ("libcublasLt.so.13", "libcublasLt.so.12")
COMPUTE_32F, REAL_32F, REAL_16BF, REAL_16F = 68, 0, 14, 2  # cublasComputeType_t, cudaDataType_t
TRANS_A, WORKSPACE_BYTES, REDUCTION_MASK = 3, 1, 3  # attributes of descriptions and preferences
DTYPES = {torch.bfloat16: REAL_16BF, torch.float16: REAL_16F}
PROPOSALS = 6  # that are asked for
ROOM = 32 << 20  # bytes that a call may work in


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


class CublasLt:
    """The library, opened once."""

    def __init__(self) -> None:
        self.library = open_library()
        self.workspace = torch.empty(ROOM, dtype=torch.uint8, device="cuda")
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
            raise RuleError(f"{name} succeeds", f"status {status}", "Check torch and the driver")

    def make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Calls a constructor."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made

    def set(self, what: str, owner: ctypes.c_void_p, attribute: int, value: Any) -> None:
        """Sets an attribute of a description or a preference."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self.call(f"cublasLtMatmul{what}SetAttribute", owner, attribute, ctypes.byref(value), size)

    def proposals(self, n: int, k: int, rows: int, dtype: torch.dtype) -> list[Any]:
        """Calls that compute y [rows, n] = x wᵀ without splitting K, the library's favourite
        first."""
        description = self.make("cublasLtMatmulDescCreate", COMPUTE_32F, REAL_32F)
        self.set("Desc", description, TRANS_A, ctypes.c_int32(1))
        layouts = []
        for height, length in ((n, k), (rows, k), (rows, n)):  # read as columns, one behind another
            sizes = (ctypes.c_uint64(length), ctypes.c_uint64(height), ctypes.c_int64(length))
            layouts.append(self.make("cublasLtMatrixLayoutCreate", DTYPES[dtype], *sizes))
        preference = self.make("cublasLtMatmulPreferenceCreate")
        self.set("Preference", preference, WORKSPACE_BYTES, ctypes.c_uint64(ROOM))
        self.set("Preference", preference, REDUCTION_MASK, ctypes.c_uint32(0))
        found, returned = (Proposal * PROPOSALS)(), ctypes.c_int(0)
        self.call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, description, *layouts, layouts[2],
            preference, PROPOSALS, found, ctypes.byref(returned),
        )  # fmt: skip
        self.call("cublasLtMatmulPreferenceDestroy", preference)
        usable = (each for each in found[: returned.value] if each.state == 0)
        return [partial(self.multiply, (description, layouts, each.algo)) for each in usable]

    def multiply(self, way: tuple[Any, list[Any], Any], x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        """y = x wᵀ on the current stream, by one proposal for one shape."""
        description, (w_layout, x_layout, y_layout), algo = way
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        w_at, x_at, y_at, room = (ctypes.c_void_p(t.data_ptr()) for t in (w, x, y, self.workspace))
        self.call(
            "cublasLtMatmul", self.handle, description, ctypes.byref(one), w_at, w_layout, x_at,
            x_layout, ctypes.byref(zero), y_at, y_layout, y_at, y_layout, ctypes.byref(algo), room,
            ctypes.c_size_t(ROOM), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        return y


def open_library() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded, or the system's."""
    torch.cuda.current_device()  # torch loads the library with the device
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuleError("cuBLASLt can be opened", f"none of {LIBRARIES}", "Install torch with CUDA")
