"""Softmax attention over a whole sequence, and the multi-head latent attention of some decoders.

In latent attention keys and values of all heads come from one small row per token: a latent
(kv_lora_rank), and one rotated key part that all heads share. Here the latent is expanded to every
head's keys and values, as the paper defines it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.lab.plain.layers import Config, Weights, linear, rms_norm, soft_cap
from lockstep.lab.plain.rope import Rotation, rotate_halves, rotate_pairs, rotation, temperature

LATENT_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps says


class Scoring(NamedTuple):
    """From dot products to scores; `sinks` [heads] take part in the softmax and have no value."""

    scale: float
    cap: float | None = None
    sinks: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scoring: Scoring) -> Tensor:
    """q [n, heads, d], k and v [m, kv heads, …], sees [n, m] → [n, heads · v's width]. Query head h
    reads key head h // (heads / kv heads)."""
    shared_by = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared_by, 1), v.repeat_interleave(shared_by, 1)
    scores = soft_cap(torch.einsum("nhd,mhd->hnm", q, k) * scoring.scale, scoring.cap)
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


def split_heads(x: Tensor, count: int) -> Tensor:
    """[n, count · d] → [n, count, d]."""
    return x.view(len(x), count, -1)


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
    q = split_heads(q, config["num_attention_heads"])
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
    expanded = split_heads(linear(latent, weights, "kv_b_proj", bias=False), heads)
    nope, v = expanded.tensor_split((config["qk_nope_head_dim"],), -1)
    shared = rotate(shared[:, None], config, turn).expand(-1, heads, -1)
    return torch.cat((nope, shared), -1), v


def rotate(x: Tensor, config: Config, turn: Rotation) -> Tensor:
    """V2 turns neighbouring columns, V3 those or halves, as its config says."""
    in_pairs = config["model_type"] == "deepseek_v2" or config["rope_interleave"]
    return rotate_pairs(x, turn) if in_pairs else rotate_halves(x, turn)
