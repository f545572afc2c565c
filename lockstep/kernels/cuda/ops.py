"""The GPU's table of operations, sm_90: bfloat16 or float16 activations, in the canonical order of
that device class. `lockstep/ops.py` specifies each operation; this file names its kernel.

The kernels are in `kernels/triton/`. A tile is chosen by the number of rows and changes no bit.
With TRITON_INTERPRET=1 the same table works on CPU tensors, without cuBLAS: so tests run it on
machines without a GPU. Instantiated by `kernels.select` when a model is loaded.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.select import find
from lockstep.kernels.triton import cache, moe, rowwise, sample
from lockstep.kernels.triton.gemm import Tile, gemm
from lockstep.kernels.triton.gemm_choice import GRID, Choices, CublasLt, choose, multiply
from lockstep.types import Choice, RuleError

FEW = Tile(rows=16, columns=64, depth=128, warps=4, stages=4, group=1)  # per head or expert
MANY = Tile(rows=64, columns=64, depth=128, warps=4, stages=4, group=1)


class Packed(NamedTuple):
    """A weight, its bias flattened, and the library calls for its shape by row count, if any."""

    weight: Tensor
    bias: Tensor | None
    choices: Choices


class Ops:
    """The GPU's operations, as specified by `lockstep.ops.Ops`. Their device is the current GPU,
    which must be of a supported class, or the CPU where kernels are interpreted."""

    dtypes = ("bfloat16", "float16")
    machine = "cuda-sm_90"
    gemm_order = Choice("k16", "our tiles; cuBLAS where its whole output has the same bits")

    def __init__(self, dtype: str = "bfloat16") -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.choices: dict[torch.Size, Choices] = {}
        self.library: CublasLt | None = None
        self.device = torch.device("cpu")
        if os.environ.get("TRITON_INTERPRET") == "1":
            return
        name, found = find()
        if name != "cuda":
            rule = "device cuda needs an NVIDIA GPU of the class sm_90 (H100, H200)"
            raise RuleError(rule, found, "Use device cpu")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.library = CublasLt()

    # ---- GEMM and experts ----

    def pack(self, weight: Tensor, bias: Tensor | None) -> Packed:
        """Copies a weight to the device; the first of a shape runs `choose` for all of them."""
        weight = weight.to(self.device).contiguous()
        if bias is not None:
            bias = bias.to(self.device).contiguous().flatten()
        is_gemm = weight.ndim == 2 and weight.dtype == self.dtype
        if self.library is not None and is_gemm and weight.shape not in self.choices:
            self.choices[weight.shape] = choose(weight, self.library, GRID)
        return Packed(weight, bias, self.choices.get(weight.shape, {}))

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """Multiplies and rounds, then adds the bias and rounds."""
        (weight, bias, choices), x = packed, x.flatten(1)
        if weight.dtype == torch.float32:
            y = moe.router(x, weight)
        else:
            y = multiply(choices, x, weight, x.new_empty(len(x), len(weight)))
        return rowwise.add_bias(y, bias)

    def batched_linear(self, x: Tensor, packed: Packed) -> Tensor:
        """Computes one GEMM per head, in one launch."""
        t, g, n = len(x), *packed.weight.shape[:2]
        y = gemm(x, packed.weight, x.new_empty(t, g, n), FEW if t <= FEW.rows else MANY)
        return rowwise.add_bias(y.view(t, g * n), packed.bias).view(t, g, n)

    def grouped_linear(self, x: Tensor, packed: Packed, routes: moe.Routes) -> Tensor:
        """Computes one GEMM per expert, in one launch."""
        few = len(routes.pairs) <= FEW.rows * len(packed.weight)
        return moe.grouped_gemm(x, packed.weight, packed.bias, routes, FEW if few else MANY)

    route = staticmethod(moe.route)
    combine = staticmethod(moe.combine)

    def dispatch(self, x: Tensor, routes: moe.Routes) -> Tensor:
        """Returns x itself: kernels find its rows through the pairs of `routes`."""
        return x

    # ---- rows, the cache, sampling ----

    rms_norm = staticmethod(rowwise.rms_norm)
    add_rms_norm = staticmethod(rowwise.add_rms_norm)
    layer_norm = staticmethod(rowwise.layer_norm)
    rope_cos_sin = staticmethod(rowwise.rope_cos_sin)
    pool = staticmethod(rowwise.pool)
    rope = staticmethod(rowwise.rope)
    qk_norm_rope = staticmethod(rowwise.qk_norm_rope)
    activate = staticmethod(rowwise.activate)
    act_and_mul = staticmethod(rowwise.act_and_mul)
    clamped_swiglu = staticmethod(rowwise.clamped_swiglu)
    soft_cap = staticmethod(rowwise.soft_cap)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Returns x[rows], by torch."""
        return x.index_select(0, rows)

    def spread_columns(self, x: Tensor, columns: Tensor, size: int) -> Tensor:
        """Returns [t, size] with x at `columns` and -inf elsewhere, by torch."""
        return x.new_full((len(x), size), -torch.inf).index_copy_(1, columns, x)

    kv_write = staticmethod(cache.write)
    kv_move = staticmethod(cache.move)
    sample_tokens = staticmethod(sample.sample_tokens)
    compute_logprobs = staticmethod(sample.compute_logprobs)
