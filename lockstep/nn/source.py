"""Where a layer's weights come from: a name and a shape give a tensor.

A model is built twice by the same code: first against a source that only notes names and shapes
(tensors of the meta device), which is the table that `models.weights` compares with the files, and
then against the files themselves, tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.nn import linear
from lockstep.nn.linear import Linear

Take = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights below `prefix`. `take(name, shape)` gives a tensor; `unused(pattern)` is told of
    names that a model leaves alone."""

    take: Take
    unused: Callable[[str], None]
    names: Container[str]
    kernel: str  # the GEMM class
    prefix: str = ""

    def at(self, *parts: str | int) -> Weights:
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
        """One tensor, which must have this shape."""
        return self.take(self.prefix + name, shape)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A GEMM of a tensor that was taken before."""
        return linear.pack(weight, bias, self.kernel)

    def linear(self, name: str, n: int, k: int, bias: bool = False) -> Linear:
        """The GEMM of `name`.weight [n, k], and `name`.bias [n]."""
        return self.pack(*self.affine(name, n, k, bias))

    def affine(self, name: str, n: int, k: int, bias: bool = False) -> tuple[Tensor, Tensor | None]:
        """`name`.weight [n, k] and `name`.bias [n], unpacked."""
        return self.tensor(f"{name}.weight", n, k), self.tensor(f"{name}.bias", n) if bias else None

    def fused(
        self, names: tuple[str, ...], ns: tuple[int, ...], k: int, bias: bool = False
    ) -> Linear:
        """One GEMM for several weights of the same input: their outputs lie behind one another."""
        parts = [self.affine(name, n, k, bias) for name, n in zip(names, ns, strict=True)]
        biases = [b for _, b in parts if b is not None]
        return self.pack(join([w for w, _ in parts]), join(biases) if biases else None)


def join(parts: list[Tensor]) -> Tensor:
    """Tensors behind one another; of the meta device only the shape, which torch would load its
    compiler for."""
    if parts[0].is_meta:
        return torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], device="meta")
    return torch.cat(parts)
