"""Activations and the feed-forward layer.

On the CPU an activation is one of our row kernels: torch's own exp, erf, tanh, silu and gelu have a
vector body and a scalar tail that differ, so that bits would depend on the number of rows and on
the width of the processor's vectors. Elsewhere it is made of tensor operations whose elements do
not depend on their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.cpu import rows
from lockstep.nn.linear import Linear
from lockstep.nn.norm import on_cpu
from lockstep.nn.source import Weights
from lockstep.types import RuleError

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """An elementwise function: its number among the row kernels of the CPU, and its formula with
    tensors for other devices."""

    kernel: int
    formula: Function

    def __call__(self, x: Tensor) -> Tensor:
        return rows.apply(self.kernel, x) if on_cpu(x) else self.formula(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


sigmoid = Activation(rows.SIGMOID, lambda x: 1.0 / (1.0 + torch.exp(-x)))
silu = Activation(rows.SILU, lambda x: x / (1.0 + torch.exp(-x)))  # x · sigmoid(x)
gelu = Activation(rows.GELU, lambda x: 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5))))  # x · Φ(x)
gelu_tanh = Activation(rows.GELU_TANH, _gelu_tanh)  # the tanh approximation of gelu
relu = Activation(rows.RELU, lambda x: torch.clamp(x, min=0))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap)."""
    return rows.apply(rows.CAP, x, cap) if on_cpu(x) else torch.tanh(x / cap) * cap


ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
}


def activation(name: str) -> Activation:
    """The activation a config names."""
    if name not in ACTIVATIONS:
        raise RuleError(
            f"an activation is one of {', '.join(ACTIVATIONS)}",
            repr(name),
            "Use a model with one of these",
        )
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class Glu:
    """act(gate) · up of [T, gate then up]."""

    act: Activation

    def __call__(self, x: Tensor) -> Tensor:
        if on_cpu(x):
            return rows.gate(self.act.kernel, x)
        gate, up = x.chunk(2, -1)
        return self.act(gate) * up


@dataclass(frozen=True)
class ClampedGlu:
    """(up + 1) · gate · sigmoid(alpha · gate) of [T, gate then up], gate at most `limit`, up within
    ±limit."""

    alpha: float
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        if on_cpu(x):
            return rows.clamped_gate(x, self.alpha, self.limit)
        gate, up = x.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1.0) * (gate * sigmoid(gate * self.alpha))


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(act(up(x))); with a gate, `up` holds gate and up behind one another and `act` is a
    Glu."""

    up: Linear
    down: Linear
    act: Function

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@dataclass(frozen=True)
class MlpSpec:
    """A gated feed-forward layer: gate_proj, up_proj, down_proj."""

    hidden: int
    inner: int
    act: str
    bias: bool = False

    def build(self, w: Weights) -> Mlp:
        up = w.fused(("gate_proj", "up_proj"), (self.inner, self.inner), self.hidden, self.bias)
        return Mlp(
            up, w.linear("down_proj", self.hidden, self.inner, self.bias), Glu(activation(self.act))
        )
