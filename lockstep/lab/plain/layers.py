"""The pieces of every model: a linear map, two norms, five activations, the feed-forwards, softmax
attention over a whole sequence with rotary positions. All take float64 rows [n, width] and read
their tensors by their names in the checkpoint.

Experts: a router assigns each row to a few; the result is their weighted sum. Every expert computes
every row, and most weights are 0: nothing is grouped.

Rotary: pairs of columns of queries and keys rotate, each pair at its own frequency. Scalings
stretch some frequencies, so that positions beyond the training's resemble those within. Real
numbers throughout: that transformers rounds frequencies and angles to float32 is its arithmetic,
not the definition. partial_rotary_factor is ignored, as transformers does here.

Latent: keys and values of all heads are computed from one small row per token, a latent
(kv_lora_rank), and one rotated key part that all heads share. Here the latent is expanded to every
head's keys and values, as the paper defines it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

GEMMA = ("gemma2", "gemma3_text")
LATENT = ("deepseek_v2", "deepseek_v3")
ONE_WINDOW = ("mistral", "qwen3_moe")  # in all layers, if any
DECODERS = ("llama", "qwen2", "gpt_oss", *ONE_WINDOW, "qwen3", *GEMMA, *LATENT)
NORMED_HEADS = ("qwen3", "qwen3_moe", "gemma3_text")
LATENT_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps is
Config = Mapping[str, Any]
Expert = Callable[[int], Tensor]
Rotation = tuple[Tensor, Tensor]  # cos and sin [n, 1, pairs], times the scaling's attention factor


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors below `prefix`, as float64; a missing one raises a KeyError that names it."""

    tensors: Mapping[str, Tensor]
    prefix: str = ""

    def at(self, *parts: str | int) -> "Weights":
        """Returns the tensors of a part: weights.at("layers", 3)."""
        return Weights(self.tensors, self.prefix + "".join(f"{part}." for part in parts))

    def trunk(self, prefix: str, name: str) -> "Weights":
        """Returns the part that has `name`: a checkpoint of the trunk alone has no `prefix`."""
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


def norm(x: Tensor, config: Config, weights: Weights, name: str) -> Tensor:
    """RMS norm with a config's epsilon. Gemma's files store the weight minus 1."""
    one = 1.0 if config["model_type"] in GEMMA else 0.0
    return rms_norm(x, one + weights[f"{name}.weight"], config["rms_norm_eps"])


def layer_norm(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    """Rows of mean 0 and variance 1, times a weight, plus a bias; gamma and beta in old files."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    scale, shift = ("gamma", "beta") if f"{name}.gamma" in weights else ("weight", "bias")
    normed = centred / torch.sqrt(variance + eps)
    return normed * weights[f"{name}.{scale}"] + weights[f"{name}.{shift}"]


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
    """x, bent smoothly to stay within ±cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def mixture(logits: Tensor, ids: Tensor, shares: Tensor, output: Expert) -> Tensor:
    """Σ weight · output over all experts: `shares` [n, k] are the weights of a row's experts `ids`
    [n, k]; all other weights are 0."""
    weights = torch.zeros_like(logits).scatter(1, ids, shares)
    return torch.stack([weights[:, e, None] * output(e) for e in range(logits.shape[1])]).sum(0)


def within_groups(scores: Tensor, group_scores: Tensor, config: Config) -> Tensor:
    """scores [n, experts] with -inf for all experts outside of the best topk_group groups."""
    best = torch.topk(group_scores, config["topk_group"]).indices
    chosen = torch.zeros_like(group_scores).scatter(1, best, 1.0) > 0
    per_group = scores.shape[1] // config["n_group"]
    return scores.masked_fill(~chosen.repeat_interleave(per_group, 1), -torch.inf)


def qwen3_moe(x: Tensor, config: Config, weights: Weights) -> Tensor:
    """The likeliest experts, weighted by their probabilities among all, or among those chosen."""
    logits = linear(x, weights, "gate", bias=False)
    shares, ids = torch.topk(logits.softmax(-1), config["num_experts_per_tok"])
    if config["norm_topk_prob"]:
        shares = shares / shares.sum(-1, keepdim=True)
    return mixture(logits, ids, shares, separate_experts(x, weights, config))


def deepseek(x: Tensor, config: Config, weights: Weights) -> Tensor:
    """Routed experts, plus one that every row passes through. V2: the likeliest experts, optionally
    of the best groups only, ranked by their best expert. V3: sigmoids are weights, corrected
    sigmoids choose; a group is ranked by its best two."""
    logits, is_v2 = linear(x, weights, "gate", bias=False), config["model_type"] == "deepseek_v2"
    if is_v2:
        scores = ranked = logits.softmax(-1)
        if config["topk_method"] == "group_limited_greedy":
            grouped = scores.view(len(scores), config["n_group"], -1)
            ranked = within_groups(scores, grouped.max(-1).values, config)
    else:
        scores = torch.sigmoid(logits)
        corrected = scores + weights["gate.e_score_correction_bias"]
        grouped = corrected.view(len(scores), config["n_group"], -1)
        ranked = within_groups(corrected, torch.topk(grouped, 2).values.sum(-1), config)
    ids = torch.topk(ranked, config["num_experts_per_tok"]).indices
    shares = scores.gather(1, ids)
    if not is_v2 and config["norm_topk_prob"]:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    shares, bias = shares * config["routed_scaling_factor"], is_v2 and config["mlp_bias"]
    shared = gated_mlp(x, weights.at("shared_experts"), config["hidden_act"], bias)
    return mixture(logits, ids, shares, separate_experts(x, weights, config)) + shared


def separate_experts(x: Tensor, weights: Weights, config: Config) -> Expert:
    """Each expert has its own three matrices."""
    return lambda e: gated_mlp(x, weights.at("experts", e), config["hidden_act"])


def gpt_oss(x: Tensor, config: Config, weights: Weights) -> Tensor:
    """The largest logits, and a softmax over these alone. Experts in one tensor [experts, in, out]:
    even columns are the gate, odd ones up, both clamped."""
    logits = linear(x, weights, "router", bias=True)
    up, up_bias = weights["experts.gate_up_proj"], weights["experts.gate_up_proj_bias"]
    down, down_bias = weights["experts.down_proj"], weights["experts.down_proj_bias"]
    limit, alpha = config["swiglu_limit"], config["swiglu_alpha"]

    def expert(e: int) -> Tensor:
        both = x @ up[e] + up_bias[e]
        gate, linear_part = both[:, 0::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (linear_part + 1)) @ down[e] + down_bias[e]

    best, ids = torch.topk(logits, config["num_experts_per_tok"])
    return mixture(logits, ids, best.softmax(-1), expert)


class Scoring(NamedTuple):
    """How dot products become scores; `sinks` [heads] join the softmax and have no value."""

    scale: float
    cap: float | None = None
    sinks: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, scoring: Scoring) -> Tensor:
    """q [n, heads, d], k and v [m, kv heads, …], sees [n, m] or None for all → [n, heads · v's
    width]. Query head h reads key head h // (heads / kv heads)."""
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
    """bool [length, length]: a row sees itself and earlier rows within its window."""
    row, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    sees = key <= row
    return sees if window is None else sees & (key > row - window)


def biased_attention(
    x: Tensor, keys_from: Tensor, sees: Tensor | None, heads: int, w: Weights, maps: tuple[str, ...]
) -> Tensor:
    """Queries from x, keys and values from `keys_from`; sees [n, m], or None for all of them."""
    rows = (x, keys_from, keys_from)
    parts = [linear(each, w, name, bias=True) for each, name in zip(rows, maps, strict=False)]
    q, k, v = (part.view(len(part), heads, -1) for part in parts)
    mixed = attend(q, k, v, sees, Scoring(q.shape[-1] ** -0.5))
    return linear(mixed, w, maps[-1], bias=True)


def grouped_attention(x: Tensor, config: Config, w: Weights, i: int) -> Tensor:
    """x [n, hidden] → [n, hidden], for layer i of a decoder: many query heads share a key head."""
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
        scale=(config["query_pre_attn_scalar"] if kind in GEMMA else width) ** -0.5,
        cap=config["attn_logit_softcapping"] if kind == "gemma2" else None,
        sinks=w["sinks"] if kind == "gpt_oss" else None,
    )
    windowed = kind in ONE_WINDOW
    if not windowed and kind != "llama":
        windowed = config["layer_types"][i] == "sliding_attention"
    sees = causal(len(x), config["sliding_window"] if windowed else None)
    mixed = attend(rotate_halves(q, turn), rotate_halves(k, turn), v, sees, scoring)
    return linear(mixed, w, "o_proj", bias)


def latent_attention(x: Tensor, config: Config, weights: Weights) -> Tensor:
    """x [n, hidden] → [n, hidden], MLA. Queries are computed from the row directly or through a low
    rank and its norm; all heads share a key's rope part. V2 rotates neighbouring columns, V3 these
    or halves, by its config. Scores have yarn's temperature for both sides."""
    heads, nope_dim = config["num_attention_heads"], config["qk_nope_head_dim"]
    params, bias = config["rope_parameters"], config["attention_bias"]
    by, turn = rotation(params, config["qk_rope_head_dim"], config, len(x)), rotate_halves
    if config["model_type"] == "deepseek_v2" or config["rope_interleave"]:
        turn = rotate_pairs
    if config["q_lora_rank"] is None:
        q = linear(x, weights, "q_proj", bias=False)
    else:
        low = linear(x, weights, "q_a_proj", bias)
        low = rms_norm(low, weights["q_a_layernorm.weight"], LATENT_EPS)
        q = linear(low, weights, "q_b_proj", bias=False)
    q_nope, q_rope = q.view(len(x), heads, -1).tensor_split((nope_dim,), -1)
    compressed = linear(x, weights, "kv_a_proj_with_mqa", bias)
    latent, k_rope = compressed.tensor_split((config["kv_lora_rank"],), -1)
    latent = rms_norm(latent, weights["kv_a_layernorm.weight"], LATENT_EPS)
    expanded = linear(latent, weights, "kv_b_proj", bias=False).view(len(x), heads, -1)
    k_nope, v = expanded.tensor_split((nope_dim,), -1)
    q = torch.cat((q_nope, turn(q_rope, by)), -1)
    k = torch.cat((k_nope, turn(k_rope[:, None], by).expand(-1, heads, -1)), -1)
    scale = float(q.shape[-1] ** -0.5)
    if params["rope_type"] != "default" and params.get("mscale_all_dim"):
        scale *= temperature(params["factor"], params["mscale_all_dim"]) ** 2
    mixed = attend(q, k, v, causal(len(x)), Scoring(scale))
    return linear(mixed, weights, "o_proj", bias)


def rotation(params: Config, dim: int, config: Config, length: int) -> Rotation:
    """cos and sin for positions 0…length-1, of which `dim` columns rotate, by rope_parameters."""
    factor = attention_factor(params, config["max_position_embeddings"])
    positions = torch.arange(length, dtype=torch.float64)[:, None, None]
    angles = positions * frequencies(params, dim, config)
    return angles.cos() * factor, angles.sin() * factor


def rotate_halves(x: Tensor, by: Rotation) -> Tensor:
    """x [n, heads, dim]: column i rotates together with column i + dim/2."""
    (a, b), (cos, sin) = x.chunk(2, -1), by
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotate_pairs(x: Tensor, by: Rotation) -> Tensor:
    """x [n, heads, dim]: column 2i rotates together with column 2i + 1."""
    (a, b), (cos, sin) = (x[..., 0::2], x[..., 1::2]), by
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def frequencies(params: Config, dim: int, config: Config) -> Tensor:
    """float64 [dim / 2], by the scaling that rope_type names."""
    kind = params["rope_type"]
    plain = powers(params["rope_theta"], dim)
    if kind == "default":
        return plain
    if kind == "dynamic":
        # theta itself within max_position, larger beyond it. The length is `context_length`, which
        # the loader of the model chooses: as published it is the sequence's, and a key would depend
        # on when it was computed
        beyond = (config.get("context_length") or 0) / config["max_position_embeddings"]
        stretch = params["factor"] * max(beyond, 1.0) - (params["factor"] - 1)
        return powers(params["rope_theta"] * stretch ** (dim / (dim - 2)), dim)
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


def llama3(plain: Tensor, params: Config) -> Tensor:
    """Pairs that rotate seldom within the original length are stretched, others kept; blended."""
    low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
    turns = float(params["original_max_position_embeddings"]) * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / float(params["factor"]) + keep * plain


def yarn(plain: Tensor, params: Config, dim: int, max_position: int) -> Tensor:
    """Pairs with beta_fast rotations or more are kept, beta_slow or fewer stretched; blended."""
    fast, slow = params.get("beta_fast") or 32, params.get("beta_slow") or 1
    first, last = pair_that_turns(fast, params, dim), pair_that_turns(slow, params, dim)
    if params.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    stretch = ((torch.arange(dim // 2, dtype=torch.float64) - first) / width).clamp(0, 1)
    return stretch * plain / yarn_factor(params, max_position) + (1 - stretch) * plain


def pair_that_turns(times: float, params: Config, dim: int) -> float:
    """The pair, as a real number, that rotates `times` times within the original length."""
    wavelength = params["original_max_position_embeddings"] / times
    return float(dim / 2 * math.log(wavelength / (2 * math.pi), params["rope_theta"]))


def yarn_factor(params: Config, max_position: int) -> float:
    """The stretch; where a config does not state it, the ratio of the new context to the old."""
    return float(params["factor"] or max_position / params["original_max_position_embeddings"])


def attention_factor(params: Config, max_position: int) -> float:
    """The factor that yarn applies to cos and sin; 1 for all others."""
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
