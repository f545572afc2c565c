"""Rotary positions: frequencies are fixed at load, angles are a function of the position.

Frequencies are float64, rounded once to float32; their powers and logarithms are those of the
decimal module, which calls no math library. Dynamic NTK as published makes a key depend on how long
the sequence is when it is computed. Here the base is fixed at load: the plain one, unless a context
beyond max_position is asked for (`for_context`); then the published one for exactly that length."""

import decimal
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.order import LARGEST_ANGLE
from lockstep.types import RuleError, check_one_of

Params = Mapping[str, Any]
KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
CONTEXT = "context_length"  # a key of dynamic rope parameters: the length the base is stretched to
BROKEN = (KeyError, TypeError, ValueError, ArithmeticError)  # what bad parameters raise
EXACT = decimal.Context(prec=40)  # digits; a float64 has 17


@dataclass(frozen=True)
class Rope:
    """dim/2 frequencies. `interleaved`: columns 2i, 2i+1 rotate together, else i and i + dim/2."""

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False

    def __hash__(self) -> int:  # looked up in every layer of every step
        return hash((self.inv_freq[-1], self.factor, self.interleaved))


def make(params: Params, dim: int, max_position: int, interleaved: bool = False) -> Rope:
    """Makes a rope from a config's rope_parameters, for heads of `dim` rotated columns."""
    kind = params.get("rope_type", "default")
    check_one_of(KINDS, "rope_type", kind, "Use a model with one of these")
    part = params.get("partial_rotary_factor") or 1.0
    if not (isinstance(part, int | float) and 0 < part <= 1):
        raise RuleError("partial_rotary_factor is in (0, 1]", repr(part), "Check config.json")
    if kind != "default" and int(dim * part) != dim:  # a plain rope ignores it, as in transformers
        rule = f"with rope_type {kind} all columns of a head rotate, in transformers too"
        raise RuleError(rule, f"partial_rotary_factor={part}", "Remove it from config.json")
    rule = f"{kind} rope_parameters are complete and positive, columns even, frequencies finite"
    try:
        inv_freq, factor = _scaled(kind, params, dim, max_position)
        values = tuple(torch.tensor(inv_freq, dtype=torch.float32).tolist())
    except BROKEN as error:
        raise RuleError(rule, f"{error!r} with {dict(params)}", "Check config.json") from error
    if dim < 2 or dim % 2 or not all(map(math.isfinite, (*values, factor))):
        raise RuleError(rule, f"{dim} columns, {dict(params)}", "Check config.json")
    if max(values) * longest(params, max_position) > LARGEST_ANGLE:
        rule = f"angles are at most {LARGEST_ANGLE:.0f}"
        raise RuleError(rule, f"{max(values):g} a position, {dict(params)}", "Check config.json")
    return Rope(values, float(factor), interleaved)


def for_context(params: Params, max_position: int, context_length: int | None) -> dict[str, Any]:
    """Returns rope parameters for a context: dynamic ones record a length beyond max_position, all
    others are unchanged. Parameters may also be one such mapping per layer type."""
    own = {
        k: for_context(v, max_position, context_length) if isinstance(v, Mapping) else v
        for k, v in params.items()
        if k != CONTEXT
    }
    if own.get("rope_type") == "dynamic" and max_position < (context_length or 0):
        own[CONTEXT] = context_length
    return own


def longest(params: Params, max_position: int) -> int:
    """Returns the number of positions: max_position, or what a dynamic rope is stretched to."""
    nested = [longest(each, max_position) for each in params.values() if isinstance(each, Mapping)]
    return max([int(params.get(CONTEXT, max_position)), *nested])


def decimal_pow(base: float, exponent: float) -> float:
    """Returns base ** exponent for a positive base, rounded once."""
    return float(EXACT.power(decimal.Decimal(base + 0.0), decimal.Decimal(exponent)))


def ln(x: float) -> float:
    return float(EXACT.ln(decimal.Decimal(x + 0.0)))


def _scaled(kind: str, params: Params, dim: int, max_position: int) -> tuple[list[float], float]:
    if kind == "yarn":
        return _yarn(params, dim, max_position)
    theta = params["rope_theta"]
    if kind == "dynamic":
        factor, stretch = params["factor"], longest(params, max_position) / max_position
        if stretch > 1:
            theta *= decimal_pow(factor * stretch - (factor - 1), dim / (dim - 2))
    inv_freq = _frequencies(theta, dim)
    if kind == "linear":
        inv_freq = [f / params["factor"] for f in inv_freq]
    elif kind == "llama3":
        inv_freq = [_llama3(f, params) for f in inv_freq]
    return inv_freq, 1.0


def _frequencies(theta: float, dim: int) -> list[float]:
    return [1 / decimal_pow(theta, i / dim) for i in range(0, dim, 2)]


def _llama3(freq: float, params: Params) -> float:
    """Stretches long waves by the factor, keeps short ones, blends those in between."""
    factor: float = params["factor"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    length = params["original_max_position_embeddings"]
    wave = 2 * math.pi / freq
    if wave > length / low:
        return freq / factor
    if wave < length / high:
        return freq
    smooth: float = (length / wave - low) / (high - low)
    return (1 - smooth) * freq / factor + smooth * freq


def mscale(scale: float, weight: float = 1.0) -> float:
    """Returns yarn's temperature for a stretch of `scale`."""
    return 1.0 if scale <= 1 else 0.1 * weight * ln(scale) + 1.0


def _yarn(params: Params, dim: int, max_position: int) -> tuple[list[float], float]:
    theta, length = params["rope_theta"], params["original_max_position_embeddings"]
    factor = params["factor"] if params["factor"] is not None else max_position / length
    attention = params.get("attention_factor")
    some, every = params.get("mscale"), params.get("mscale_all_dim")
    if attention is None and some and every:
        attention = mscale(factor, some) / mscale(factor, every)
    elif attention is None:
        attention = mscale(factor)
    low = _yarn_dim(params.get("beta_fast") or 32, dim, theta, length)
    high = _yarn_dim(params.get("beta_slow") or 1, dim, theta, length)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramps = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
    pairs = zip(_frequencies(theta, dim), ramps, strict=True)
    return [f / factor * ramp + f * (1 - ramp) for f, ramp in pairs], float(attention)


def _yarn_dim(rotations: float, dim: int, theta: float, length: int) -> float:
    """Returns the column whose angle makes this many rotations within the original length."""
    return (dim * ln(length / (rotations * 2 * math.pi))) / (2 * ln(theta))
