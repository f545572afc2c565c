"""Where a layer's weights come from, and the table of operations that it is to use: a name and a
shape give a tensor.

A model is built twice by the same code: first against a source that only notes names and shapes
(tensors of the meta device), which is the table that `models.loader` compares with the files, and
then against the files themselves, tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.nn.linear import Linear
from lockstep.ops import Ops, Packed

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

    def at(self, *parts: str | int) -> WeightSource:
        """The weights of a part: w.at("layers", 3)."""
        return replace(self, prefix=self.prefix + "".join(f"{part}." for part in parts))

    def has(self, name: str) -> bool:
        """Whether the files hold it."""
        return self.prefix + name in self.names

    def skip(self, pattern: str) -> None:
        """The files may hold tensors of these names (a regular expression), which the model does
        not need."""
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
        return Linear(self.pack(*self.affine(name, n, k, bias)), self.ops)

    def affine(self, name: str, n: int, k: int, bias: bool = False) -> tuple[Tensor, Tensor | None]:
        """`name`.weight [n, k] and `name`.bias [n], unpacked."""
        return self.tensor(f"{name}.weight", n, k), self.tensor(f"{name}.bias", n) if bias else None

    def fused(
        self, names: tuple[str, ...], ns: tuple[int, ...], k: int, bias: bool = False
    ) -> Linear:
        """One GEMM for several weights of the same input: their outputs lie behind one another."""
        return Linear(self.pack(*self.joined(names, ns, k, bias)), self.ops)

    def joined(
        self, names: tuple[str, ...], ns: tuple[int, ...], k: int, bias: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Several weights of the same input as one, and their biases."""
        parts = [self.affine(name, n, k, bias) for name, n in zip(names, ns, strict=True)]
        biases = [b for _, b in parts if b is not None]
        return join([w for w, _ in parts]), join(biases) if biases else None


def join(parts: list[Tensor]) -> Tensor:
    """Tensors behind one another; of the meta device only the shape, which torch would load its
    compiler for."""
    if parts[0].is_meta:
        return torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], device="meta")
    return torch.cat(parts)


def stack(parts: list[Tensor]) -> Tensor:
    """Tensors of one shape as one; of the meta device only the shape."""
    if parts[0].is_meta:
        return torch.empty(len(parts), *parts[0].shape, device="meta")
    return torch.stack(parts)
