"""Mixture of experts: a router gives each row a few experts, the result is their weighted sum.
Every expert computes every row, and most weights are 0: nothing is grouped."""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.lab.plain.layers import Config, Weights, gated_mlp, linear, sigmoid

Expert = Callable[[int], Tensor]


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
    scores = sigmoid(logits)
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
        return (gate * sigmoid(alpha * gate) * (linear_part + 1)) @ down[e] + down_bias[e]

    best, ids = torch.topk(logits, config["num_experts_per_tok"])
    return mixture(logits, ids, best.softmax(-1), expert)
