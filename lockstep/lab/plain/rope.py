"""Rotary positions: pairs of columns of queries and keys turn, each pair at its own frequency.

Scalings stretch some frequencies, so that positions beyond those of the training look like ones
within. Real numbers throughout: that transformers rounds frequencies and angles to float32 is its
arithmetic, not the definition. partial_rotary_factor is ignored, as transformers does here.
"""

import math

import torch
from torch import Tensor

from lockstep.lab.plain.layers import Config

Rotation = tuple[Tensor, Tensor]  # cos and sin [n, 1, pairs], times the scaling's attention factor


def rotation(params: Config, dim: int, config: Config, length: int) -> Rotation:
    """Of rows at positions 0…length-1, of which `dim` columns turn, by rope_parameters."""
    factor = attention_factor(params, config["max_position_embeddings"])
    positions = torch.arange(length, dtype=torch.float64)[:, None, None]
    angles = positions * frequencies(params, dim, config)
    return angles.cos() * factor, angles.sin() * factor


def rotate_halves(x: Tensor, by: Rotation) -> Tensor:
    """x [n, heads, dim]: column i turns together with column i + dim/2."""
    (a, b), (cos, sin) = x.chunk(2, -1), by
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotate_pairs(x: Tensor, by: Rotation) -> Tensor:
    """x [n, heads, dim]: column 2i turns together with column 2i + 1."""
    (a, b), (cos, sin) = (x[..., 0::2], x[..., 1::2]), by
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def frequencies(params: Config, dim: int, config: Config) -> Tensor:
    """float64 [dim / 2], by the scaling that rope_type names."""
    kind = params["rope_type"]
    plain = powers(params["rope_theta"], dim)
    if kind == "default":
        return plain
    if kind == "dynamic":
        return powers(stretched_base(params, dim, config), dim)
    if kind == "linear":
        return plain / float(params["factor"])
    if kind == "llama3":
        return llama3(plain, params)
    if kind == "yarn":
        return yarn(plain, params, dim, config["max_position_embeddings"])
    raise KeyError(f"rope_type {kind}")


def powers(theta: float, dim: int) -> Tensor:
    """theta^(-2i / dim): from 1 down to nearly 1 / theta."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    return 1 / torch.pow(torch.tensor(theta, dtype=torch.float64), exponents)


def stretched_base(params: Config, dim: int, config: Config) -> float:
    """Dynamic: theta itself within max_position; larger for a context length beyond it. The length
    is a decision of whoever loads the model, `context_length`: as published it is that of the
    sequence, and a key would depend on when it was computed."""
    length = config.get("context_length") or 0
    beyond = max(length / config["max_position_embeddings"], 1.0)
    stretch = params["factor"] * beyond - (params["factor"] - 1)
    return float(params["rope_theta"] * stretch ** (dim / (dim - 2)))


def llama3(plain: Tensor, params: Config) -> Tensor:
    """Pairs that turn seldom within the original length are stretched, the others kept; blended."""
    low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
    turns = float(params["original_max_position_embeddings"]) * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / float(params["factor"]) + keep * plain


def yarn(plain: Tensor, params: Config, dim: int, max_position: int) -> Tensor:
    """Pairs that turn beta_fast times or more are kept, beta_slow or less stretched; blended."""
    fast, slow = params.get("beta_fast") or 32, params.get("beta_slow") or 1
    first, last = pair_that_turns(fast, params, dim), pair_that_turns(slow, params, dim)
    if params.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    stretch = ((torch.arange(dim // 2, dtype=torch.float64) - first) / width).clamp(0, 1)
    return stretch * plain / yarn_factor(params, max_position) + (1 - stretch) * plain


def pair_that_turns(times: float, params: Config, dim: int) -> float:
    """The pair, as a real number, that turns so often within the original length."""
    wavelength = params["original_max_position_embeddings"] / times
    return float(dim / 2 * math.log(wavelength / (2 * math.pi), params["rope_theta"]))


def yarn_factor(params: Config, max_position: int) -> float:
    """The stretch; where a config does not state it, how much longer the context became."""
    return float(params["factor"] or max_position / params["original_max_position_embeddings"])


def attention_factor(params: Config, max_position: int) -> float:
    """What yarn multiplies cos and sin with; 1 for all others."""
    if params["rope_type"] != "yarn":
        return 1.0
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    factor = yarn_factor(params, max_position)
    above, below = params.get("mscale"), params.get("mscale_all_dim")
    if above and below:
        return temperature(factor, above) / temperature(factor, below)
    return temperature(factor)


def temperature(factor: float, weight: float = 1.0) -> float:
    """How much sharper scores are over a context `factor` times longer, on each side."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
