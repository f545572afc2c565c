"""Where a layer's weights come from, and which operations it uses: a name and a shape → a tensor. A
model is built twice by the same code: first against a source that only notes names and shapes, then
against the files (`models.loader`)."""

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lockstep.nn.linear import Linear
from lockstep.ops import Ops, Packed

Affine = tuple[Tensor, Tensor | None]  # weight and bias
Take = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True, eq=False)
class WeightSource:
    """The weights below `prefix`, for a device. `take(name, shape)` gives a float32 tensor;
    `unused(pattern)` is told of names that a model leaves alone."""

    take: Take
    unused: Callable[[str], None]
    names: Container[str]
    ops: Ops
    prefix: str = ""

    def at(self, *parts: str | int) -> Self:
        """The weights of a part: w.at("layers", 3)."""
        return replace(self, prefix=self.prefix + "".join(f"{part}." for part in parts))

    def has(self, name: str) -> bool:
        return self.prefix + name in self.names

    def skip(self, pattern: str) -> None:
        """The files may hold tensors of these names, a regular expression, that nobody needs."""
        self.unused(re.escape(self.prefix) + pattern)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor, which must have this shape: float32."""
        return self.take(self.prefix + name, shape)

    def rows(self, name: str, *shape: int) -> Tensor:
        """One tensor in the dtype of activations: what rows are taken from, or added to them."""
        return self.tensor(name, *shape).to(self.ops.dtype)

    def pack(
        self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Packed:
        """A tensor that was taken before, [n, k] or [g, n, k], as the table's GEMM wants it; one of
        the meta device, a shape without numbers, as it is. `dtype`: of rows, if not the table's."""
        if weight.is_meta:
            return weight
        dtype = dtype or self.ops.dtype
        return self.ops.pack(weight.to(dtype), None if bias is None else bias.to(dtype))

    def linear(self, name: str, n: int, k: int, bias: bool = False) -> Linear:
        """The GEMM of `name`.weight [n, k], and `name`.bias [n]."""
        return self.fused({name: n}, k, bias)

    def fused(self, widths: Mapping[str, int], k: int, bias: bool = False) -> Linear:
        """One GEMM for several weights of the same input: their outputs lie behind one another."""
        return Linear(self.pack(*self.affine(widths, k, bias)), self.ops)

    def affine(self, widths: Mapping[str, int], k: int, bias: bool = False) -> Affine:
        """Per name and width n, `name`.weight [n, k] and `name`.bias [n], joined and unpacked."""
        weights, biases = [], []
        for name, n in widths.items():
            weights.append(self.tensor(f"{name}.weight", n, k))
            if bias:
                biases.append(self.tensor(f"{name}.bias", n))
        return join(weights), join(biases) if bias else None


def join(parts: list[Tensor]) -> Tensor:
    """Tensors behind one another; of meta tensors the shape: torch.cat would load a compiler."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_meta:
        return torch.empty(sum(map(len, parts)), *parts[0].shape[1:], device="meta")
    return torch.cat(parts)


def stack(parts: list[Tensor]) -> Tensor:
    return join([part[None] for part in parts])
