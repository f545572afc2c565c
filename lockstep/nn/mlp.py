"""Activations and the feed-forward layer.

Activations are written with operators whose elements do not depend on their neighbours: torch's own silu, sigmoid and tanh-gelu treat
the end of a memory block with other instructions than its middle, so a row's bits would change with the number of rows.
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

Activation = Callable[[Tensor], Tensor]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e⁻ˣ)."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    return x / (1.0 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    """x · Φ(x)."""
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of gelu."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.clamp(x, min=0)


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
        raise RuleError(f"an activation is one of {', '.join(ACTIVATIONS)}", repr(name), "Use a model with one of these")
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class Glu:
    """act(gate) · up of [T, gate then up]."""

    act: Activation

    def __call__(self, x: Tensor) -> Tensor:
        if self.act is silu and on_cpu(x):
            return rows.silu_gate(x)
        gate, up = x.chunk(2, -1)
        return self.act(gate) * up


@dataclass(frozen=True)
class ClampedGlu:
    """(up + 1) · gate · sigmoid(alpha · gate) of [T, gate then up], gate at most `limit`, up within ±limit."""

    alpha: float
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1.0) * (gate * sigmoid(gate * self.alpha))


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(act(up(x))); with a gate, `up` holds gate and up behind one another and `act` is a Glu."""

    up: Linear
    down: Linear
    act: Activation

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
        return Mlp(up, w.linear("down_proj", self.hidden, self.inner, self.bias), Glu(activation(self.act)))
