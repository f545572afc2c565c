"""The GPU's table of operations, sm_90: bfloat16 or float16 activations, the canonical order of
that device class. What each operation does says `lockstep/ops.py`; here is which kernel does it.

The texts lie in `kernels/triton/`. A tile is chosen by the number of rows and changes no bit. With
TRITON_INTERPRET=1 the same table works on tensors of the CPU, without any library: so the tests
look at it where there is no GPU. Knows kernels; made by `kernels.select` when a model is loaded.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.triton import cache, moe, rowwise, sample
from lockstep.kernels.triton.cublas import CublasLt
from lockstep.kernels.triton.gemm import Tile, batched_gemm
from lockstep.kernels.triton.gemm_choice import GRID, Choices, choose, multiply
from lockstep.ops import Routing
from lockstep.types import Choice, RuleError

FEW = Tile(rows=16, columns=64, depth=128, warps=4, stages=4)  # of one head, or one expert
MANY = Tile(rows=64, columns=64, depth=128, warps=4, stages=4)


class Packed(NamedTuple):
    """A weight, its bias, and who multiplies with it: None for a float32 one, or one of three
    dimensions."""

    weight: Tensor
    bias: Tensor | None
    choices: Choices | None


def find_device() -> torch.device:
    """The current GPU, if it is of a class we know; the CPU where kernels are interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuleError("device cuda needs an NVIDIA GPU", "none is visible", "Use device cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        got = f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"
        raise RuleError("device cuda is of the class sm_90 (H100, H200)", got, "Use device cpu")
    return device


class Ops:
    """The table; `lockstep.ops.Ops` is what it is."""

    dtypes = ("bfloat16", "float16")
    machine = "cuda-sm_90"
    gemm_order = Choice("k16", "our tiles, and cuBLAS where its whole output has their bits")

    def __init__(self, dtype: str = "bfloat16") -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = find_device()
        self.library = CublasLt() if self.device.type == "cuda" else None
        self.choices: dict[torch.Size, Choices] = {}
        self.tables: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor, int]] = {}

    # ---- GEMM and experts ----

    def pack(self, weight: Tensor, bias: Tensor | None) -> Packed:
        """On the device, contiguous; the first weight of a shape chooses for all of them."""
        weight = weight.to(self.device).contiguous()
        bias = None if bias is None else bias.to(self.device).contiguous()
        if weight.ndim == 3 or weight.dtype == torch.float32:
            return Packed(weight, bias, None)
        if weight.shape not in self.choices:
            grid = GRID if self.library else GRID[:1]  # no library: nothing to compare
            self.choices[weight.shape] = choose(weight, self.library, grid)
        return Packed(weight, bias, self.choices[weight.shape])

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """Rounded, then the bias, rounded."""
        (weight, bias, choices), x = packed, x.flatten(1)
        if choices is None:
            y = moe.router(x, weight)
        else:
            y = multiply(choices, x, weight, rowwise.new_rows(x, len(weight)))
        return y if bias is None else rowwise.add_bias(y, bias)

    def batched_linear(self, x: Tensor, packed: Packed) -> Tensor:
        """One GEMM per head."""
        t, g, n = len(x), *packed.weight.shape[:2]
        y = torch.empty(t, g, n, dtype=x.dtype, device=x.device)
        batched_gemm(x, packed.weight, y, FEW if t <= FEW.rows else MANY)
        if packed.bias is None:
            return y
        return rowwise.add_bias(y.view(t, g * n), packed.bias.flatten()).view(t, g, n)

    def grouped_linear(self, x: Tensor, packed: Packed, routes: moe.Routes) -> Tensor:
        """One GEMM per expert, in one launch."""
        few = len(routes.pairs) <= FEW.rows * len(packed.weight)
        return moe.grouped_gemm(x, packed.weight, packed.bias, routes, FEW if few else MANY)

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> moe.Routes:
        """Ids and weights, then the lists: two launches."""
        ids, weights = moe.route(logits, routing, correction)
        return moe.Routes(ids, weights, *moe.list_pairs(ids, routing.experts))

    def dispatch(self, x: Tensor, routes: moe.Routes) -> Tensor:
        """x itself: the lists find its rows."""
        return x

    combine = staticmethod(moe.combine)

    # ---- rows ----

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
        """Torch's own."""
        return x.index_select(0, rows)

    # ---- the cache ----

    kv_write = staticmethod(cache.write)

    def kv_move(self, storages: Sequence[Tensor], moves: Tensor) -> None:
        """All storages in one launch; their addresses and row lengths are brought to the device
        once. An address alone names none: it may have been another cache's before."""
        if not len(moves):
            return
        key = tuple((s.data_ptr(), s.stride(0) * s.element_size()) for s in storages)
        if key not in self.tables:
            self.tables[key] = cache.storage_table(storages)
        cache.move(self.tables[key], moves)

    # ---- sampling ----

    sample_tokens = staticmethod(sample.sample_tokens)
    compute_logprobs = staticmethod(sample.compute_logprobs)
