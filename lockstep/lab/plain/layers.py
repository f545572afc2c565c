"""The pieces of every model: a linear map, two norms, five activations, the feed-forwards, plain or
of experts: a router gives each row a few, the result is their weighted sum. Every expert computes
every row, and most weights are 0: nothing is grouped.

All take float64 rows [n, width], and read their tensors by their names in the checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

GEMMA = ("gemma2", "gemma3_text")
LATENT = ("deepseek_v2", "deepseek_v3")
ONE_WINDOW = ("mistral", "qwen3_moe")  # in all layers, if any
DECODERS = ("llama", "qwen2", "gpt_oss", *ONE_WINDOW, "qwen3", *GEMMA, *LATENT)
Config = Mapping[str, Any]
Expert = Callable[[int], Tensor]


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


def norm(x: Tensor, config: Config, weights: Weights, name: str) -> Tensor:
    """Gemma's files hold the weight less 1."""
    one = 1.0 if config["model_type"] in GEMMA else 0.0
    return rms_norm(x, one + weights[f"{name}.weight"], config["rms_norm_eps"])


def layer_norm(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    """Rows of mean 0 and variance 1, times a weight, plus a bias. Old files say gamma and beta."""
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
    """x, bent smoothly so that it stays within ±cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def mixture(logits: Tensor, ids: Tensor, shares: Tensor, output: Expert) -> Tensor:
    """Σ weight · output over all experts: `shares` [n, k] of those that a row is given to, `ids`
    [n, k], and 0 for all others."""
    weights = torch.zeros_like(logits).scatter(1, ids, shares)
    return torch.stack([weights[:, e, None] * output(e) for e in range(logits.shape[1])]).sum(0)


def within_groups(scores: Tensor, group_scores: Tensor, config: Config) -> Tensor:
    """scores [n, experts] with -inf for all experts outside of the best topk_group groups."""
    best = torch.topk(group_scores, config["topk_group"]).indices
    chosen = torch.zeros_like(group_scores).scatter(1, best, 1.0) > 0
    per_group = scores.shape[1] // config["n_group"]
    return scores.masked_fill(~chosen.repeat_interleave(per_group, 1), -torch.inf)


def qwen3_moe(x: Tensor, config: Config, weights: Weights) -> Tensor:
    """The likeliest experts, by their probabilities among all, or among those chosen."""
    logits = linear(x, weights, "gate", bias=False)
    shares, ids = torch.topk(logits.softmax(-1), config["num_experts_per_tok"])
    if config["norm_topk_prob"]:
        shares = shares / shares.sum(-1, keepdim=True)
    return mixture(logits, ids, shares, separate_experts(x, weights, config))


def deepseek(x: Tensor, config: Config, weights: Weights) -> Tensor:
    """Routed experts, and beside them one that every row passes through."""
    logits = linear(x, weights, "gate", bias=False)
    route = deepseek_v2_route if config["model_type"] == "deepseek_v2" else deepseek_v3_route
    ids, shares = route(logits, config, weights)
    bias = config["model_type"] == "deepseek_v2" and config["mlp_bias"]
    shared = gated_mlp(x, weights.at("shared_experts"), config["hidden_act"], bias)
    return mixture(logits, ids, shares, separate_experts(x, weights, config)) + shared


def deepseek_v2_route(logits: Tensor, config: Config, weights: Weights) -> tuple[Tensor, Tensor]:
    """The likeliest of the best groups; a group is as good as its best expert."""
    scores = ranked = logits.softmax(-1)
    if config["topk_method"] == "group_limited_greedy":
        best_of_group = scores.view(len(scores), config["n_group"], -1).max(-1).values
        ranked = within_groups(scores, best_of_group, config)
    ids = torch.topk(ranked, config["num_experts_per_tok"]).indices
    return ids, scores.gather(1, ids) * config["routed_scaling_factor"]


def deepseek_v3_route(logits: Tensor, config: Config, weights: Weights) -> tuple[Tensor, Tensor]:
    """Sigmoids weigh, corrected ones choose; a group is as good as its best two."""
    scores = torch.sigmoid(logits)
    corrected = scores + weights["gate.e_score_correction_bias"]
    grouped = corrected.view(len(scores), config["n_group"], -1)
    ranked = within_groups(corrected, torch.topk(grouped, 2).values.sum(-1), config)
    ids = torch.topk(ranked, config["num_experts_per_tok"]).indices
    shares = scores.gather(1, ids)
    if config["norm_topk_prob"]:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return ids, shares * config["routed_scaling_factor"]


def separate_experts(x: Tensor, weights: Weights, config: Config) -> Expert:
    """Each expert has its own three matrices."""
    return lambda e: gated_mlp(x, weights.at("experts", e), config["hidden_act"])


def gpt_oss(x: Tensor, config: Config, weights: Weights) -> Tensor:
    """The largest logits, and a softmax over these alone. Experts in one tensor [experts, in, out]:
    even columns gate, odd ones up, both clamped."""
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
