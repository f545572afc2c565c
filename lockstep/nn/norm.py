"""Norms: one row at a time, in float32, one rounding at the end. Gemma's 1 + w is added once, when
the weight is loaded."""

from dataclasses import dataclass

from torch import Tensor

from lockstep.nn.source import WeightSource
from lockstep.ops import Ops


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""

    weight: Tensor
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum): what goes on, and the residual for the next."""
        if residual is None:
            return self(hidden), hidden
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


def layer_norm(
    w: WeightSource, size: int, eps: float, names: tuple[str, str] = ("weight", "bias")
) -> LayerNorm:
    """The norm whose weight and bias lie below `w` under these names."""
    weight, bias = (w.tensor(name, size) for name in names)
    return LayerNorm(weight, bias, eps, w.ops)
