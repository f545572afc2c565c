"""The plain layers (linear, norms, embedding) and the source of their weights: a name and a shape →
a tensor, and the device's operations.

A model is built twice by the same code: first against a source that only notes names and shapes,
then against the files (`models.loader`). A norm computes in float32 and rounds once."""

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
        """Returns (norm of the sum, the sum): the next layer's input, and the residual."""
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
    """The weights whose names begin with `prefix`, for a device."""

    take: Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) → a float32 tensor
    unused: Callable[[str], None]  # is passed each pattern of names that a model does not use
    names: Container[str]
    ops: Ops
    prefix: str = ""

    def at(self, *parts: str | int) -> Self:
        """Returns the weights of a part: w.at("layers", 3)."""
        return replace(self, prefix=self.prefix + "".join(f"{part}." for part in parts))

    def has(self, name: str) -> bool:
        return self.prefix + name in self.names

    def skip(self, pattern: str) -> None:
        """Allows tensors in the files that the model does not use; `pattern` is a regex."""
        self.unused(re.escape(self.prefix) + pattern)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Returns one tensor, which must have this shape, as float32."""
        return self.take(self.prefix + name, shape)

    def rows(self, name: str, *shape: int) -> Tensor:
        """Returns one tensor in the dtype of activations: its rows are looked up, or added."""
        return self.tensor(name, *shape).to(self.ops.dtype)

    def pack(
        self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Packed:
        """Returns a tensor taken before, [n, k] or [g, n, k], in the format of the table's GEMM; a
        meta tensor, which has no numbers, as it is. `dtype`: of rows, if not the table's."""
        if weight.is_meta:
            return weight
        dtype = dtype or self.ops.dtype
        return self.ops.pack(weight.to(dtype), None if bias is None else bias.to(dtype))

    def linear(self, name: str, n: int, k: int, bias: bool = False) -> Linear:
        """Returns the GEMM of `name`.weight [n, k], and `name`.bias [n]."""
        return self.fused({name: n}, k, bias)

    def fused(self, widths: Mapping[str, int], k: int, bias: bool = False) -> Linear:
        """Returns one GEMM for several weights of one input; their outputs are concatenated."""
        return Linear(self.pack(*self.affine(widths, k, bias)), self.ops)

    def affine(self, widths: Mapping[str, int], k: int, bias: bool = False) -> Affine:
        """Returns `name`.weight [n, k] and `name`.bias [n] of all names, joined and not packed."""
        weights, biases = [], []
        for name, n in widths.items():
            weights.append(self.tensor(f"{name}.weight", n, k))
            if bias:
                biases.append(self.tensor(f"{name}.bias", n))
        return join(weights), join(biases) if bias else None


def join(parts: list[Tensor]) -> Tensor:
    """Concatenates tensors; of meta tensors the shapes: torch.cat would load a compiler."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_meta:
        return torch.empty(sum(map(len, parts)), *parts[0].shape[1:], device="meta")
    return torch.cat(parts)


def stack(parts: list[Tensor]) -> Tensor:
    return join([part[None] for part in parts])


@dataclass(frozen=True)
class RMSSpec:
    """The RMS norms of a model. `plus_one`: the file holds w, the layer multiplies by 1 + w."""

    eps: float
    plus_one: bool = False

    def weight(self, w: WeightSource, name: str, size: int) -> Tensor:
        """Returns the factors of a norm, float32 [size]."""
        weight = w.tensor(f"{name}.weight", size)
        return weight + 1.0 if self.plus_one else weight

    def build(self, w: WeightSource, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.weight(w, name, size), self.eps, w.ops)


def layer_norm(w: WeightSource, size: int, eps: float) -> LayerNorm:
    """Builds the norm at `w`. Old files call its weight and bias gamma and beta."""
    names = ("gamma", "beta") if w.has("gamma") else ("weight", "bias")
    weight, bias = (w.tensor(name, size) for name in names)
    return LayerNorm(weight, bias, eps, w.ops)
