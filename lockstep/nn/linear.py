"""The one GEMM of the engine: y = x Wᵀ + b, where a row of y never depends on the other rows of x.

Weights are packed once, at load, for one of the kernels below; every row count uses the same one. The default on the CPU is oneDNN with
packed weights, two private operators of torch that are named here and nowhere else. `certify_linear` proves on the machine that a
packed weight keeps the promise; where it does not, `blocked` (our own loop, K ascending, one accumulator) does by construction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.types import RuleError

PACK_ROWS = 64  # oneDNN packs for this row count; another number is another bit class
LONE_K = 1024  # above, oneDNN has another kernel, and another order of K, for one row: a lone row is given a twin
COLUMNS = 32  # outputs that `blocked` computes together: changes speed, never bits


@dataclass(frozen=True)
class Kernel:
    """How one GEMM class stores a weight [n, k] and multiplies rows [t, k] with it, giving [t, n]."""

    pack: Callable[[Tensor], Tensor]
    run: Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x Wᵀ + bias, x [t, in_features] → y [t, out_features]. The bias is added after the product is rounded."""

    out_features: int
    in_features: int
    packed: Tensor
    bias: Tensor | None
    kernel: Kernel

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_zeros(0, self.out_features)
        y = self.kernel.run(x.contiguous(), self.packed, self.out_features)
        return y if self.bias is None else y + self.bias


def pack(weight: Tensor, bias: Tensor | None, kernel: str) -> Linear:
    """A weight [n, k], ready to multiply with. Tensors of the meta device (shapes without numbers) are kept as they are."""
    if kernel not in KERNELS:
        raise RuleError(f"a GEMM kernel is one of {', '.join(KERNELS)}", repr(kernel), "Pick one of these")
    n, k = weight.shape
    packed = weight if weight.is_meta else KERNELS[kernel].pack(weight.contiguous())
    return Linear(n, k, packed, bias, KERNELS[kernel])


def default_kernel(device: str) -> tuple[str, str]:
    """The GEMM class for a device, and the reason in words."""
    if device != "cpu":
        raise RuleError("there is a GEMM with a proven order for the device", device, "Use the CPU")
    if torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "onednn", "onednn: packed weights, one class for every row count"
    return "blocked", "blocked: this torch has no oneDNN"


def certify_linear(layer: Linear, rows: int = 64, threads: Sequence[int] = (1, 2)) -> str | None:
    """None if a row has the same bits in every company, else what differed.

    Tried: 1…rows+1 rows from the front and from the back, shuffled rows, every thread count.
    """
    total = rows + 1
    x = torch.randn(total, layer.in_features, generator=torch.Generator().manual_seed(total))
    shuffle = torch.randperm(total, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads[0])
        want = layer(x)
        for count in threads:
            torch.set_num_threads(count)
            if not torch.equal(layer(x[shuffle]), want[shuffle]):
                return f"{layer.out_features}x{layer.in_features}: shuffled rows differ at {count} threads"
            for m in range(1, total + 1):
                if not (torch.equal(layer(x[:m]), want[:m]) and torch.equal(layer(x[-m:]), want[-m:])):
                    return f"{layer.out_features}x{layer.in_features}: {m} rows differ from {total} at {count} threads"
    finally:
        torch.set_num_threads(before)
    return None


def linears(part: Any) -> Iterator[Linear]:
    """Every GEMM of a model, or of a part of one."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from linears(item)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            yield from linears(getattr(part, field.name))


def _pack_onednn(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
    return packed


def _run_onednn(x: Tensor, packed: Tensor, _: int) -> Tensor:
    rows = x.expand(2, -1).contiguous() if len(x) == 1 and x.shape[1] > LONE_K else x
    # without its bias: oneDNN's fused one is not row-invariant in bfloat16
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    return y[: len(x)]


def _pack_blocked(weight: Tensor) -> Tensor:
    """[blocks, k, COLUMNS] float32, the last block filled up with zeros."""
    n, k = weight.shape
    blocks = -(-n // COLUMNS)
    padded = torch.zeros(blocks * COLUMNS, k)
    padded[:n] = weight
    return padded.view(blocks, COLUMNS, k).transpose(1, 2).contiguous()


def _run_blocked(x: Tensor, packed: Tensor, n: int) -> Tensor:
    y = torch.empty(len(x), packed.shape[0] * COLUMNS)
    _blocked_loop()(x.float().contiguous().numpy(), packed.numpy(), y.numpy())
    return y[:, :n].to(x.dtype)


@cache
def _blocked_loop() -> Callable[..., None]:
    """Compiled on first use. Vector lanes run over outputs, never over K, so there is nothing to reassociate."""
    from numba import njit

    def loop(x: Any, w: Any, y: Any) -> None:
        acc = np.empty(COLUMNS, np.float32)
        for b in range(w.shape[0]):
            for r in range(x.shape[0]):
                acc[:] = 0
                for k in range(x.shape[1]):
                    scalar = x[r, k]
                    for j in range(COLUMNS):
                        acc[j] += scalar * w[b, k, j]
                y[r, b * COLUMNS : (b + 1) * COLUMNS] = acc

    compiled: Callable[..., None] = njit(nogil=True)(loop)
    return compiled


KERNELS = {"onednn": Kernel(_pack_onednn, _run_onednn), "blocked": Kernel(_pack_blocked, _run_blocked)}
