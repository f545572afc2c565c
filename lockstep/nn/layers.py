"""The plain layers, linear, norms and embedding, and where their weights come from: a name and a
shape → a tensor, and the operations that it is used with.

A model is built twice by the same code: first against a source that only notes names and shapes,
then against the files (`models.loader`). A norm takes a row, in float32, and rounds it once."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from lockstep.ops import Ops, Packed

Affine = tuple[Tensor, Tensor | None]  # weight and bias


@dataclass(frozen=True, eq=False)
class Linear:
    """x [t, k] → [t, n]. The bias is added after the product is rounded."""

    packed: Packed
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.packed)


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""

    weight: Tensor
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum): what goes on, and the residual for the next."""
        total, normed = self.ops.add_rms_norm(hidden, residual, self.weight, self.eps)
        return normed, total


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) · weight + bias over the last dimension."""

    weight: Tensor
    bias: Tensor
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, eq=False)
class Embedding:
    """weight [vocab, d]; ids [T] → [T, d], times `scale`."""

    weight: Tensor
    ops: Ops
    scale: float = 1.0

    def __call__(self, ids: Tensor) -> Tensor:
        hidden = self.ops.take_rows(self.weight, ids)
        if self.scale == 1.0:
            return hidden
        return hidden * torch.tensor(self.scale, dtype=hidden.dtype)


def pool(ops: Ops, hidden: Tensor, q_indptr: Sequence[int], how: str) -> Tensor:
    """hidden [T, d], rows of request i in [q_indptr[i], q_indptr[i+1]) → [B, d] of norm 1."""
    ends = list(pairwise(q_indptr))
    spans = [{"last": (b - 1, b), "mean": (a, b), "first": (a, a + 1)}[how] for a, b in ends]
    return ops.pool(hidden, spans)


@dataclass(frozen=True, eq=False)
class WeightSource:
    """The weights below `prefix`, for a device."""

    take: Callable[[str, tuple[int, ...]], Tensor]  # by name and shape, a float32 tensor
    unused: Callable[[str], None]  # is told a pattern of names that a model leaves alone
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


@dataclass(frozen=True)
class RMSSpec:
    """The RMS norms of a model. `plus_one`: the file holds w, the layer multiplies with 1 + w."""

    eps: float
    plus_one: bool = False

    def weight(self, w: WeightSource, name: str, size: int) -> Tensor:
        """float32 [size], as it is multiplied with."""
        weight = w.tensor(f"{name}.weight", size)
        return weight + 1.0 if self.plus_one else weight

    def build(self, w: WeightSource, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.weight(w, name, size), self.eps, w.ops)


def layer_norm(w: WeightSource, size: int, eps: float) -> LayerNorm:
    """The norm below `w`. Old files call its weight and bias gamma and beta."""
    names = ("gamma", "beta") if w.has("gamma") else ("weight", "bias")
    weight, bias = (w.tensor(name, size) for name in names)
    return LayerNorm(weight, bias, eps, w.ops)
