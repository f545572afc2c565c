"""The models with an encoder: bert, whose rows all see each other and are one segment, and bart,
whose decoder's layers look at the encoder's rows as well.

Norms stand behind the residuals, positions are learnt, all linear maps have biases.
"""

import torch
from torch import Tensor

from lockstep.lab.plain.attention import Scoring, attend, causal
from lockstep.lab.plain.layers import Config, Weights, layer_norm, linear, plain_mlp

BART_EPS = 1e-5
FIRST_POSITION = 2  # of bart: position p is row p + 2 of the table
SHARED = "shared.weight"
BERT_MAPS = ("self.query", "self.key", "self.value", "output.dense")
BART_MAPS = ("q_proj", "k_proj", "v_proj", "out_proj")


def bert_hidden_states(config: Config, weights: Weights, ids: Tensor) -> Tensor:
    """ids [n] → [n, hidden]."""
    w = weights.trunk("bert", "embeddings.word_embeddings.weight")
    table, eps = w.at("embeddings"), config["layer_norm_eps"]
    words = table["word_embeddings.weight"][ids]
    segment = table["token_type_embeddings.weight"][0]
    positions = table["position_embeddings.weight"][torch.arange(len(ids))]
    x = layer_norm(words + segment + positions, table, "LayerNorm", eps)
    for i in range(config["num_hidden_layers"]):
        layer = w.at("encoder", "layer", i)
        heads, maps = config["num_attention_heads"], layer.at("attention")
        x = x + attention(x, x, None, heads, maps, BERT_MAPS)
        x = layer_norm(x, layer, "attention.output.LayerNorm", eps)
        names = ("intermediate.dense", "output.dense")
        x = x + plain_mlp(x, layer, names, config["hidden_act"])
        x = layer_norm(x, layer, "output.LayerNorm", eps)
    return x


def bart_hidden_states(config: Config, weights: Weights, ids: Tensor, source: Tensor) -> Tensor:
    """The decoder's rows for `ids`, behind the encoder's for `source`."""
    w = weights.trunk("model", SHARED)
    return bart_side(config, w, "decoder", ids, bart_side(config, w, "encoder", source, None))


def bart_logits(config: Config, weights: Weights, hidden: Tensor) -> Tensor:
    """By the embedding that both sides share, plus a bias that the checkpoint keeps as a buffer."""
    out = linear(hidden, weights.trunk("model", SHARED), "shared", bias=False)
    return out + weights["final_logits_bias"][0] if "final_logits_bias" in weights else out


def bart_side(config: Config, w: Weights, side: str, ids: Tensor, encoded: Tensor | None) -> Tensor:
    """An encoder's rows all see each other; a decoder's see those before them, then `encoded`."""
    own, heads = w.at(side), config[f"{side}_attention_heads"]
    scale = config["d_model"] ** 0.5 if config["scale_embedding"] else 1.0
    positions = own["embed_positions.weight"][torch.arange(len(ids)) + FIRST_POSITION]
    x = w[SHARED][ids] * scale + positions
    x = layer_norm(x, own, "layernorm_embedding", BART_EPS)
    sees = None if encoded is None else causal(len(x))
    for i in range(config[f"{side}_layers"]):
        layer = own.at("layers", i)
        x = x + attention(x, x, sees, heads, layer.at("self_attn"), BART_MAPS)
        x = layer_norm(x, layer, "self_attn_layer_norm", BART_EPS)
        if encoded is not None:
            maps = layer.at("encoder_attn")
            x = x + attention(x, encoded, None, heads, maps, BART_MAPS)
            x = layer_norm(x, layer, "encoder_attn_layer_norm", BART_EPS)
        x = x + plain_mlp(x, layer, ("fc1", "fc2"), config["activation_function"])
        x = layer_norm(x, layer, "final_layer_norm", BART_EPS)
    return x


def attention(
    x: Tensor, keys_from: Tensor, sees: Tensor | None, heads: int, w: Weights, maps: tuple[str, ...]
) -> Tensor:
    """Queries from x, keys and values from the other rows, of which a row `sees` some, or all."""
    rows = (x, keys_from, keys_from)
    parts = [linear(each, w, name, bias=True) for each, name in zip(rows, maps, strict=False)]
    q, k, v = (part.unflatten(1, (heads, -1)) for part in parts)
    mixed = attend(q, k, v, sees, Scoring(q.shape[-1] ** -0.5))
    return linear(mixed, w, maps[-1], bias=True)
