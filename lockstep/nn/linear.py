"""The one GEMM of the engine: y = x Wᵀ + b, where a row of y never depends on the other rows of x.

Weights are packed once, at load, for one of the kernels below; every row count uses the same one.
`lanes`, our own, keeps the promise by construction: every element is one fma chain over K. oneDNN
with packed weights, two private operators of torch that are named here and nowhere else, keeps it
where `run.certify` proves it on the machine with the whole model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.cpu import gemm
from lockstep.types import RuleError

PACK_ROWS = 64  # oneDNN packs for this row count; another number is another bit class
# above, oneDNN has another kernel, and another order of K, for one row: a lone row is given a twin
LONE_K = 1024


@dataclass(frozen=True)
class Kernel:
    """How one GEMM class stores a weight [n, k] with its bias [n], and multiplies rows [t, k] with
    it, giving [t, n]."""

    pack: Callable[[Tensor, Tensor | None], Any]
    run: Callable[[Tensor, Any, int], Tensor]


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x Wᵀ + bias, x [t, in_features] → y [t, out_features]. The bias is added after the
    product is rounded."""

    out_features: int
    in_features: int
    packed: Any
    kernel: Kernel

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_zeros(0, self.out_features)
        return self.kernel.run(x, self.packed, self.out_features)


def pack(weight: Tensor, bias: Tensor | None, kernel: str) -> Linear:
    """A weight [n, k], ready to multiply with. Tensors of the meta device (shapes without numbers)
    are kept as they are."""
    if kernel not in KERNELS:
        raise RuleError(
            f"a GEMM kernel is one of {', '.join(KERNELS)}", repr(kernel), "Pick one of these"
        )
    n, k = weight.shape
    packed = weight if weight.is_meta else KERNELS[kernel].pack(weight.contiguous(), bias)
    return Linear(n, k, packed, KERNELS[kernel])


def kernels(device: str) -> dict[str, str]:
    """The GEMM classes of a device and the reason for each, best first: the first one that is
    certified is used."""
    if device != "cpu":
        raise RuleError("there is a GEMM with a proven order for the device", device, "Use the CPU")
    known = {"lanes": "lanes: our own, one fma chain per element"}
    if torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        known["onednn"] = "onednn: packed weights, one class for every row count"
    return known


def default_kernel(device: str) -> tuple[str, str]:
    """The best GEMM class of a device, and the reason in words."""
    return next(iter(kernels(device).items()))


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
                return (
                    f"{layer.out_features}x{layer.in_features}: shuffled rows differ at {count} "
                    "threads"
                )
            for m in range(1, total + 1):
                if not (
                    torch.equal(layer(x[:m]), want[:m]) and torch.equal(layer(x[-m:]), want[-m:])
                ):
                    return (
                        f"{layer.out_features}x{layer.in_features}: {m} rows differ from {total} "
                        f"at {count} threads"
                    )
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


def _run_lanes(x: Tensor, packed: Tensor, n: int) -> Tensor:
    return gemm.matmul(x if x.stride(1) == 1 else x.contiguous(), packed, n)


def _pack_onednn(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS), bias


def _run_onednn(x: Tensor, packed: tuple[Tensor, Tensor | None], _: int) -> Tensor:
    rows = (x.expand(2, -1) if len(x) == 1 and x.shape[1] > LONE_K else x).contiguous()
    # without its bias: oneDNN's fused one is not row-invariant in bfloat16
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed[0], None, "none", [], "")[: len(x)]
    return y if packed[1] is None else y + packed[1]


KERNELS = {"lanes": Kernel(gemm.pack, _run_lanes), "onednn": Kernel(_pack_onednn, _run_onednn)}
