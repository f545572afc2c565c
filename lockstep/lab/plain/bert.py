"""Bert: an encoder whose rows all see each other. A request is one segment."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.lab.plain.attention import Scoring, attend, split_heads
from lockstep.lab.plain.layers import Config, Weights, layer_norm, linear, plain_mlp


def hidden_states(config: Config, weights: Weights, ids: Tensor) -> Tensor:
    """ids [n] → [n, hidden]. Models with a head have "bert." before the names of the encoder."""
    w = weights if "embeddings.word_embeddings.weight" in weights else weights.at("bert")
    x = embed(config, w.at("embeddings"), ids)
    for i in range(config["num_hidden_layers"]):
        x = layer(x, config, w.at("encoder", "layer", i))
    return x


def embed(config: Config, w: Weights, ids: Tensor) -> Tensor:
    """Token plus first segment plus position, normed."""
    words = w["word_embeddings.weight"][ids]
    segment = w["token_type_embeddings.weight"][0]
    positions = w["position_embeddings.weight"][torch.arange(len(ids))]
    return layer_norm(words + segment + positions, w, "LayerNorm", config["layer_norm_eps"])


def layer(x: Tensor, config: Config, w: Weights) -> Tensor:
    """Attention and feed-forward, a norm behind each residual."""
    eps = config["layer_norm_eps"]
    mixed = attention(x, config, w.at("attention"))
    x = layer_norm(x + mixed, w, "attention.output.LayerNorm", eps)
    fed = plain_mlp(x, w, ("intermediate.dense", "output.dense"), config["hidden_act"])
    return layer_norm(x + fed, w, "output.LayerNorm", eps)


def attention(x: Tensor, config: Config, w: Weights) -> Tensor:
    """Every row sees all rows."""
    everything = torch.ones(len(x), len(x), dtype=torch.bool)
    parts = [linear(x, w, f"self.{name}", bias=True) for name in ("query", "key", "value")]
    q, k, v = (split_heads(part, config["num_attention_heads"]) for part in parts)
    mixed = attend(q, k, v, everything, Scoring(q.shape[-1] ** -0.5))
    return linear(mixed, w, "output.dense", bias=True)
