"""Softmax attention over a whole sequence, rotary positions, and the multi-head latent attention of
some decoders.

Rotary: pairs of columns of queries and keys turn, each pair at its own frequency. Scalings stretch
some frequencies, so that positions beyond those of the training look like ones within. Real numbers
throughout: that transformers rounds frequencies and angles to float32 is its arithmetic, not the
definition. partial_rotary_factor is ignored, as transformers does here.

Latent: keys and values of all heads come from one small row per token, a latent (kv_lora_rank), and
one rotated key part that all heads share. Here the latent is expanded to every head's keys and
values, as the paper defines it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.lab.plain import layers
from lockstep.lab.plain.layers import Config, Weights, linear, norm, rms_norm, soft_cap

NORMED_HEADS = ("qwen3", "qwen3_moe", "gemma3_text")
LATENT_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps says
Rotation = tuple[Tensor, Tensor]  # cos and sin [n, 1, pairs], times the scaling's attention factor


class Scoring(NamedTuple):
    """From dot products to scores; `sinks` [heads] take part in the softmax and have no value."""

    scale: float
    cap: float | None = None
    sinks: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, scoring: Scoring) -> Tensor:
    """q [n, heads, d], k and v [m, kv heads, …], sees [n, m], or all → [n, heads · v's width].
    Query head h reads key head h // (heads / kv heads)."""
    shared_by = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared_by, 1), v.repeat_interleave(shared_by, 1)
    scores = soft_cap(torch.einsum("nhd,mhd->hnm", q, k) * scoring.scale, scoring.cap)
    if sees is not None:
        scores = scores.masked_fill(~sees, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, sinks), -1)
    shares = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hnm,mhd->nhd", shares, v).flatten(1)


def causal(length: int, window: int | None = None) -> Tensor:
    """bool [length, length]: a row sees itself and those before, as far as its window."""
    row, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    sees = key <= row
    return sees if window is None else sees & (key > row - window)


def biased_attention(
    x: Tensor, keys_from: Tensor, sees: Tensor | None, heads: int, w: Weights, maps: tuple[str, ...]
) -> Tensor:
    """Queries from x, keys and values from the other rows, of which a row `sees` some, or all."""
    rows = (x, keys_from, keys_from)
    parts = [linear(each, w, name, bias=True) for each, name in zip(rows, maps, strict=False)]
    q, k, v = (part.view(len(part), heads, -1) for part in parts)
    mixed = attend(q, k, v, sees, Scoring(q.shape[-1] ** -0.5))
    return linear(mixed, w, maps[-1], bias=True)


def self_attention(x: Tensor, config: Config, w: Weights, i: int) -> Tensor:
    """x [n, hidden] → [n, hidden], of layer i of a decoder."""
    if config["model_type"] in layers.LATENT:
        return latent_attention(x, config, w)
    return grouped_attention(x, config, w, i)


def grouped_attention(x: Tensor, config: Config, w: Weights, i: int) -> Tensor:
    """Many query heads share a key head."""
    kind = config["model_type"]
    bias = kind not in ("mistral", "qwen2") and config["attention_bias"]
    kv_heads = config["num_key_value_heads"]
    counts = {"q_proj": config["num_attention_heads"], "k_proj": kv_heads, "v_proj": kv_heads}
    rows = {name: linear(x, w, name, bias or kind == "qwen2") for name in counts}
    q, k, v = (rows[name].view(len(x), count, -1) for name, count in counts.items())
    if kind in NORMED_HEADS:
        q, k = norm(q, config, w, "q_norm"), norm(k, config, w, "k_norm")
    width, ropes = q.shape[-1], config["rope_parameters"]
    params = ropes[config["layer_types"][i]] if kind == "gemma3_text" else ropes
    turn = rotation(params, width, config, len(x))
    scoring = Scoring(
        scale=(config["query_pre_attn_scalar"] if kind in layers.GEMMA else width) ** -0.5,
        cap=config["attn_logit_softcapping"] if kind == "gemma2" else None,
        sinks=w["sinks"] if kind == "gpt_oss" else None,
    )
    windowed = kind in layers.ONE_WINDOW
    if not windowed and kind != "llama":
        windowed = config["layer_types"][i] == "sliding_attention"
    sees = causal(len(x), config["sliding_window"] if windowed else None)
    mixed = attend(rotate_halves(q, turn), rotate_halves(k, turn), v, sees, scoring)
    return linear(mixed, w, "o_proj", bias)


def latent_attention(x: Tensor, config: Config, weights: Weights) -> Tensor:
    """x [n, hidden] → [n, hidden]. Scores have yarn's temperature for both sides."""
    params = config["rope_parameters"]
    turn = rotation(params, config["qk_rope_head_dim"], config, len(x))
    q = queries(x, config, weights, turn)
    k, v = keys_and_values(x, config, weights, turn)
    scale = float(q.shape[-1] ** -0.5)
    if params["rope_type"] != "default" and params.get("mscale_all_dim"):
        scale *= temperature(params["factor"], params["mscale_all_dim"]) ** 2
    mixed = attend(q, k, v, causal(len(x)), Scoring(scale))
    return linear(mixed, weights, "o_proj", config["attention_bias"])


def queries(x: Tensor, config: Config, weights: Weights, turn: Rotation) -> Tensor:
    """[n, heads, nope + rope], straight from the row or through a low rank and its norm."""
    if config["q_lora_rank"] is None:
        q = linear(x, weights, "q_proj", bias=False)
    else:
        low = linear(x, weights, "q_a_proj", config["attention_bias"])
        low = rms_norm(low, weights["q_a_layernorm.weight"], LATENT_EPS)
        q = linear(low, weights, "q_b_proj", bias=False)
    q = q.view(len(x), config["num_attention_heads"], -1)
    nope, rope = q.tensor_split((config["qk_nope_head_dim"],), -1)
    return torch.cat((nope, rotate(rope, config, turn)), -1)


def keys_and_values(
    x: Tensor, config: Config, weights: Weights, turn: Rotation
) -> tuple[Tensor, Tensor]:
    """Keys [n, heads, nope + rope], the rope part the same for all, and values [n, heads, v]."""
    compressed = linear(x, weights, "kv_a_proj_with_mqa", config["attention_bias"])
    latent, shared = compressed.tensor_split((config["kv_lora_rank"],), -1)
    latent = rms_norm(latent, weights["kv_a_layernorm.weight"], LATENT_EPS)
    heads = config["num_attention_heads"]
    expanded = linear(latent, weights, "kv_b_proj", bias=False).view(len(x), heads, -1)
    nope, v = expanded.tensor_split((config["qk_nope_head_dim"],), -1)
    shared = rotate(shared[:, None], config, turn).expand(-1, heads, -1)
    return torch.cat((nope, shared), -1), v


def rotate(x: Tensor, config: Config, turn: Rotation) -> Tensor:
    """V2 turns neighbouring columns, V3 those or halves, as its config says."""
    in_pairs = config["model_type"] == "deepseek_v2" or config["rope_interleave"]
    return rotate_pairs(x, turn) if in_pairs else rotate_halves(x, turn)


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
