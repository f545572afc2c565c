"""Rotary positions: frequencies are constants of the load, angles a function of the position and of nothing else.

Every scaling of the supported families: default, linear, dynamic, llama3, yarn. Dynamic NTK as published makes the base a function of
how long the sequence is right now, so that a key depends on when it was computed; here its base is fixed at load for the longest
sequence, max_position · factor, and equals the published one at exactly that length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.cpu import rows
from lockstep.nn.norm import on_cpu
from lockstep.types import RuleError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


class Angles(NamedTuple):
    """cos and sin of a step's rows, [T, 1, dim/2], float32, times the scaling's factor."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Rope:
    """inv_freq holds dim/2 frequencies. `interleaved`: columns 2i and 2i+1 turn together, otherwise i and i + dim/2."""

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False

    def __hash__(self) -> int:  # looked up in every layer of every step
        return hash((self.inv_freq[-1], self.factor, self.interleaved))

    @cached_property
    def _freqs(self) -> Tensor:
        return torch.tensor(self.inv_freq, dtype=torch.float32)

    def angles(self, positions: Tensor) -> Angles:
        """positions [T]."""
        turns = positions.float()[:, None, None] * self._freqs.to(positions.device)
        cos, sin = turns.cos(), turns.sin()
        return Angles(cos, sin) if self.factor == 1.0 else Angles(cos * self.factor, sin * self.factor)

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """x [T, heads, d]: its first dim columns turned, the rest as they are. The result has the halves layout."""
        if on_cpu(x):
            return rows.rotate(x, angles.cos, angles.sin, self.interleaved)
        dim = 2 * len(self.inv_freq)
        part, rest = x[..., :dim].float(), x[..., dim:]
        a, b = (part[..., ::2], part[..., 1::2]) if self.interleaved else part.chunk(2, -1)
        turned = (a * angles.cos - b * angles.sin, b * angles.cos + a * angles.sin)
        return torch.cat((*(t.to(x.dtype) for t in turned), rest), -1)


def make(params: Mapping[str, Any], dim: int, max_position: int, interleaved: bool = False) -> Rope:
    """A model's rope from its config's rope_parameters."""
    kind = params.get("rope_type", "default")
    if kind not in KINDS:
        raise RuleError(f"rope_type is one of {', '.join(KINDS)}", repr(kind), "Use a model with one of these")
    part = params.get("partial_rotary_factor") or 1.0
    if not (isinstance(part, int | float) and 0 < part <= 1):
        raise RuleError("partial_rotary_factor is a fraction of a head's columns", repr(part), "Check config.json")
    dim = int(dim * part)
    try:
        inv_freq, factor = _scaled(kind, params, dim, max_position)
    except (KeyError, TypeError, ZeroDivisionError, OverflowError, ValueError) as error:
        got = f"{error!r} with {dict(params)}"
        raise RuleError(f"rope_parameters of type {kind} are complete and positive numbers", got, "Check config.json") from error
    values = tuple(inv_freq.tolist())
    if dim < 2 or dim % 2 or not all(map(math.isfinite, (*values, factor))):
        raise RuleError("rope has an even number of columns and finite frequencies", f"{dim} columns, {dict(params)}", "Check config.json")
    return Rope(values, float(factor), interleaved)


def longest(params: Mapping[str, Any], max_position: int) -> int:
    """Positions that the frequencies are made for: a dynamic rope's, fixed at load, reach beyond max_position."""
    return int(max_position * params["factor"]) if params.get("rope_type") == "dynamic" else max_position


def _scaled(kind: str, params: Mapping[str, Any], dim: int, max_position: int) -> tuple[Tensor, float]:
    theta = params["rope_theta"]
    if kind == "dynamic":
        return _frequencies(ntk_base(theta, params["factor"], dim), dim), 1.0
    if kind == "yarn":
        return _yarn(params, dim, max_position)
    inv_freq = _frequencies(theta, dim)
    if kind == "linear":
        return inv_freq / params["factor"], 1.0
    return (_llama3(inv_freq, params) if kind == "llama3" else inv_freq), 1.0


def _frequencies(theta: float, dim: int) -> Tensor:
    return torch.reciprocal(theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def ntk_base(theta: float, factor: float, dim: int) -> float:
    """The base of dynamic NTK at the length max_position · factor."""
    return float(theta * (factor * factor - (factor - 1)) ** (dim / (dim - 2)))


def _llama3(inv_freq: Tensor, params: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    factor, low, high = params["factor"], params["low_freq_factor"], params["high_freq_factor"]
    length = params["original_max_position_embeddings"]
    wave = 2 * math.pi / inv_freq
    stretched = torch.where(wave > length / low, inv_freq / factor, inv_freq)
    smooth = (length / wave - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = ~(wave < length / high) & ~(wave > length / low)
    return torch.where(between, blended, stretched)


def mscale(scale: float, weight: float = 1.0) -> float:
    """Yarn's temperature for a stretch of `scale`."""
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def _yarn(params: Mapping[str, Any], dim: int, max_position: int) -> tuple[Tensor, float]:
    theta, length = params["rope_theta"], params["original_max_position_embeddings"]
    factor = params["factor"] if params["factor"] is not None else max_position / length
    attention = params.get("attention_factor")
    if attention is None:
        weights = params.get("mscale"), params.get("mscale_all_dim")
        attention = mscale(factor, weights[0]) / mscale(factor, weights[1]) if weights[0] and weights[1] else mscale(factor)
    low, high = (_yarn_dim(params.get(key) or default, dim, theta, length) for key, default in (("beta_fast", 32), ("beta_slow", 1)))
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    waves = theta ** (torch.arange(0, dim, 2).float() / dim)
    keep = 1 - ramp
    return (1.0 / (factor * waves)) * (1 - keep) + (1.0 / waves) * keep, float(attention)


def _yarn_dim(rotations: float, dim: int, theta: float, length: int) -> float:
    """The column whose wave turns this often within the original length."""
    return (dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(theta))
