"""The CPU's table of operations, float32. `lockstep/ops.py` specifies each operation; this file
names the kernel that computes it. Instantiated by `kernels.select` when a model is loaded."""

import platform
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.cpu import gemm, routing, rows, sample
from lockstep.kv.pool import _bits, pad_columns
from lockstep.ops import transparent
from lockstep.types import KV_FORMATS, Choice

LARGEST = {getattr(torch, f.torch_name): f.largest for f in KV_FORMATS.values() if f.largest}


def kv_write(storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
    """Writes values / scale, clamped to the format's range and rounded once, to storage[slots]."""
    same = values.dtype is storage.dtype is torch.float32 and scale == 1.0
    fits = values.shape == (len(slots), *storage.shape[1:])  # torch rejects any other shape below
    if same and fits and slots.dtype is torch.int32 and values.stride(2) == 1:
        rows.write(values, storage, slots)
        return
    values = pad_columns(values, storage.shape[2])
    if scale != 1.0:
        values = values / scale
    largest = LARGEST.get(storage.dtype)
    if largest is not None:
        values = values.clamp(-largest, largest)
    _bits(storage).index_copy_(0, slots.long(), _bits(values.to(storage.dtype)))


def kv_move(storages: Sequence[Tensor], moves: Tensor) -> None:
    """Copies slots moves[:, 0] to moves[:, 1] in every storage; gathers all, then scatters."""
    if len(moves):
        source, target = moves.long().unbind(1)
        for storage in map(_bits, storages):
            storage[target] = storage[source]


class Ops:
    """The CPU's operations, as specified by `lockstep.ops.Ops`."""

    dtypes: tuple[str, ...] = ("float32",)
    device = torch.device("cpu")
    machine = f"cpu-{platform.machine()}"
    gemm_order = Choice("fma_chain", "our own kernel: one fma chain per element")

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)

    pack = staticmethod(gemm.pack)
    linear = staticmethod(transparent(gemm.linear))
    batched_linear = staticmethod(transparent(gemm.batched_linear))
    grouped_linear = staticmethod(transparent(gemm.grouped_linear))
    route = staticmethod(routing.route)
    dispatch = staticmethod(routing.dispatch)
    combine = staticmethod(routing.combine)
    rms_norm = staticmethod(transparent(rows.rms_norm))
    add_rms_norm = staticmethod(transparent(rows.add_rms_norm))
    layer_norm = staticmethod(transparent(rows.layer_norm))
    rope_cos_sin = staticmethod(transparent(rows.rope_cos_sin))
    rope = staticmethod(transparent(rows.rope))
    qk_norm_rope = staticmethod(transparent(rows.qk_norm_rope))
    activate = staticmethod(transparent(rows.activate))
    act_and_mul = staticmethod(transparent(rows.act_and_mul))
    clamped_swiglu = staticmethod(transparent(rows.clamped_swiglu))
    soft_cap = staticmethod(transparent(rows.soft_cap))
    pool = staticmethod(rows.pool)
    take_rows = staticmethod(transparent(rows.take))
    spread_columns = staticmethod(transparent(rows.spread))
    kv_write = staticmethod(transparent(kv_write))
    kv_move = staticmethod(transparent(kv_move))
    sample_tokens = staticmethod(transparent(sample.sample_tokens))
    compute_logprobs = staticmethod(transparent(sample.compute_logprobs))
