"""Bart: an encoder reads the source; every layer of a decoder looks at its rows.

Norms stand behind the residuals, positions are learnt, all linear maps have biases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.lab.plain.attention import Scoring, attend, causal, split_heads
from lockstep.lab.plain.layers import Config, Weights, layer_norm, linear, plain_mlp

EPS = 1e-5
FIRST_POSITION = 2  # position p is row p + 2 of the table


def hidden_states(config: Config, weights: Weights, ids: Tensor, source: Tensor) -> Tensor:
    """The decoder's rows for `ids`, behind the encoder's for `source`."""
    w = trunk(weights)
    encoded = embed(config, w, "encoder", source)
    for i in range(config["encoder_layers"]):
        encoded = encoder_layer(encoded, config, w.at("encoder", "layers", i))
    x = embed(config, w, "decoder", ids)
    for i in range(config["decoder_layers"]):
        x = decoder_layer(x, encoded, config, w.at("decoder", "layers", i))
    return x


def logits(config: Config, weights: Weights, hidden: Tensor) -> Tensor:
    """By the embedding that both sides share, plus a bias that the checkpoint keeps as a buffer."""
    out = linear(hidden, trunk(weights), "shared", bias=False)
    return out + weights["final_logits_bias"][0] if "final_logits_bias" in weights else out


def trunk(weights: Weights) -> Weights:
    """A checkpoint of the trunk alone has no "model." before its names."""
    return weights if "shared.weight" in weights else weights.at("model")


def embed(config: Config, w: Weights, side: str, ids: Tensor) -> Tensor:
    """Token plus position, normed."""
    scale = config["d_model"] ** 0.5 if config["scale_embedding"] else 1.0
    words = w["shared.weight"][ids] * scale
    half = w.at(side)
    positions = half["embed_positions.weight"][torch.arange(len(ids)) + FIRST_POSITION]
    return layer_norm(words + positions, half, "layernorm_embedding", EPS)


def encoder_layer(x: Tensor, config: Config, w: Weights) -> Tensor:
    """Every row sees all rows."""
    everything = torch.ones(len(x), len(x), dtype=torch.bool)
    heads = config["encoder_attention_heads"]
    own = attention(x, x, everything, heads, w.at("self_attn"))
    x = layer_norm(x + own, w, "self_attn_layer_norm", EPS)
    return feed_forward(x, config, w)


def decoder_layer(x: Tensor, encoded: Tensor, config: Config, w: Weights) -> Tensor:
    """Every row sees those before it, then all rows of the encoder."""
    everything = torch.ones(len(x), len(encoded), dtype=torch.bool)
    heads = config["decoder_attention_heads"]
    own = attention(x, x, causal(len(x)), heads, w.at("self_attn"))
    x = layer_norm(x + own, w, "self_attn_layer_norm", EPS)
    cross = attention(x, encoded, everything, heads, w.at("encoder_attn"))
    x = layer_norm(x + cross, w, "encoder_attn_layer_norm", EPS)
    return feed_forward(x, config, w)


def attention(x: Tensor, keys_from: Tensor, sees: Tensor, heads: int, w: Weights) -> Tensor:
    """Queries from x, keys and values from the other rows."""
    q = split_heads(linear(x, w, "q_proj", bias=True), heads)
    k = split_heads(linear(keys_from, w, "k_proj", bias=True), heads)
    v = split_heads(linear(keys_from, w, "v_proj", bias=True), heads)
    return linear(attend(q, k, v, sees, Scoring(q.shape[-1] ** -0.5)), w, "out_proj", bias=True)


def feed_forward(x: Tensor, config: Config, w: Weights) -> Tensor:
    """The second half of a layer of either side."""
    fed = plain_mlp(x, w, ("fc1", "fc2"), config["activation_function"])
    return layer_norm(x + fed, w, "final_layer_norm", EPS)
