"""The pieces of every model: a linear map, two norms, five activations, the feed-forwards.

All take float64 rows [n, width], and read their tensors by their names in the checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Config = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors below `prefix`, as float64; one that is not there is a KeyError that names it."""

    tensors: Mapping[str, Tensor]
    prefix: str = ""

    def at(self, *parts: str | int) -> "Weights":
        """The tensors of a part: weights.at("layers", 3)."""
        return Weights(self.tensors, self.prefix + "".join(f"{part}." for part in parts))

    def trunk(self, prefix: str, name: str) -> "Weights":
        """Where `name` is: a checkpoint of the trunk alone has no `prefix` before its names."""
        return self if name in self else self.at(prefix)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name].double()

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors


def linear(x: Tensor, weights: Weights, name: str, bias: bool) -> Tensor:
    """x Wᵀ + b; W [out, in]."""
    product = x @ weights[f"{name}.weight"].T
    return product + weights[f"{name}.bias"] if bias else product


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Rows of mean square 1, times `scale`."""
    mean_square = (x * x).mean(-1, keepdim=True)
    return x / torch.sqrt(mean_square + eps) * scale


def layer_norm(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    """Rows of mean 0 and variance 1, times a weight, plus a bias. Old files say gamma and beta."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    scale, shift = ("gamma", "beta") if f"{name}.gamma" in weights else ("weight", "bias")
    normed = centred / torch.sqrt(variance + eps)
    return normed * weights[f"{name}.{scale}"] + weights[f"{name}.{shift}"]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gated_mlp(x: Tensor, weights: Weights, activation: str, bias: bool = False) -> Tensor:
    """down(act(gate(x)) · up(x)): the feed-forward of every decoder here."""
    gate = ACTIVATIONS[activation](linear(x, weights, "gate_proj", bias))
    return linear(gate * linear(x, weights, "up_proj", bias), weights, "down_proj", bias)


def plain_mlp(x: Tensor, weights: Weights, names: tuple[str, str], activation: str) -> Tensor:
    """down(act(up(x))), both with a bias: the feed-forward of bert and bart."""
    up, down = names
    inner = ACTIVATIONS[activation](linear(x, weights, up, bias=True))
    return linear(inner, weights, down, bias=True)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """x, bent smoothly so that it stays within ±cap."""
    return x if cap is None else cap * torch.tanh(x / cap)
