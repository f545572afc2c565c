"""Norms: one row at a time, in float32, one rounding at the end. Gemma's 1 + w is added once, when
the weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.kernels.cpu import rows
from lockstep.nn.source import Weights


def on_cpu(x: Tensor) -> bool:
    """Whether the row kernels of the CPU take x."""
    return x.dtype is torch.float32 and x.device.type == "cpu"


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if on_cpu(x):
            return rows.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)

    def after(self, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + more, and the norm of that."""
        if more is None:
            return x, self(x)
        if on_cpu(x) and on_cpu(more):
            return rows.add_norm(x, more, self.weight, self.eps)
        x = x + more
        return x, self(x)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) · weight + bias over the last dimension."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if on_cpu(x):
            return rows.layer_norm(x, self.weight, self.bias, self.eps)
        return F.layer_norm(x.float(), x.shape[-1:], self.weight, self.bias, self.eps).to(x.dtype)


Norm = RMSNorm | LayerNorm


@dataclass(frozen=True)
class RMSSpec:
    """The RMS norms of a model. `plus_one`: the file holds w, the layer multiplies with 1 + w."""

    eps: float
    plus_one: bool = False

    def build(self, w: Weights, name: str, size: int) -> RMSNorm:
        weight = w.tensor(f"{name}.weight", size).float()
        return RMSNorm(weight + 1.0 if self.plus_one else weight, self.eps)


def layer_norm(w: Weights, name: str, size: int, eps: float) -> LayerNorm:
    """`name`.weight and `name`.bias."""
    return LayerNorm(
        w.tensor(f"{name}.weight", size).float(), w.tensor(f"{name}.bias", size).float(), eps
    )
