"""Every model a second time, in plain float64 torch: what it computes, not how an engine does it.

A sequence is computed whole, by one function per idea: read it to learn what a model is. It shares
no line with the engine and imports nothing of it. `lab.values` compares the engine with it,
tests/test_plain.py compares it with transformers.

Decoder-only families differ in three choices: how norms and residuals surround a layer's two halves
(`layer`), which attention, which feed-forward. Two models have an encoder. In bert, all rows see
each other and are one segment; bart's decoder also attends to its encoder's rows. In both, norms
follow the residuals, positions are learnt, and all linear maps have biases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.lab.plain import layers
from lockstep.lab.plain.layers import GEMMA, LATENT, Config, Weights, layer_norm, linear, norm

MODEL_TYPES = (*sorted(layers.DECODERS), "bart", "bert")
FIRST = "embed_tokens.weight"
BART_EPS = 1e-5
FIRST_POSITION = 2  # in bart's table, position p is row p + 2
SHARED = "shared.weight"
BERT_MAPS = ("self.query", "self.key", "self.value", "output.dense")
BART_MAPS = ("q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model folder's contents: config.json, every field stated, and the tensors by name."""

    config: Config
    tensors: Mapping[str, Tensor]


def hidden_states(checkpoint: Checkpoint, ids: Sequence[int], source: Sequence[int] = ()) -> Tensor:
    """float64 [len(ids), hidden]: the last layer's rows, after the last norm. For an
    encoder-decoder, the encoder reads `source` and the decoder `ids`."""
    config, weights, rows = checkpoint.config, Weights(checkpoint.tensors), torch.tensor(ids)
    if config["model_type"] == "bert":
        return bert_hidden_states(config, weights, rows)
    if config["model_type"] == "bart":
        shared = weights.trunk("model", SHARED)
        encoded = bart_side(config, shared, "encoder", torch.tensor(source), None)
        return bart_side(config, shared, "decoder", rows, encoded)
    w = weights.trunk("model", FIRST)
    x = w[FIRST][rows]
    if config["model_type"] in GEMMA:
        x = x * config["hidden_size"] ** 0.5
    for i in range(config["num_hidden_layers"]):
        x = layer(x, config, w.at("layers", i), i)
    return norm(x, config, w, "norm")


def logits(checkpoint: Checkpoint, ids: Sequence[int], source: Sequence[int] = ()) -> Tensor:
    """float64 [len(ids), vocabulary]: each row's logits for the next token, by the embedding where
    it is tied. Bart's shared embedding has a bias, a buffer in the file."""
    config, weights = checkpoint.config, Weights(checkpoint.tensors)
    hidden = hidden_states(checkpoint, ids, source)
    if config["model_type"] == "bart":
        out = linear(hidden, weights.trunk("model", SHARED), "shared", bias=False)
        if "final_logits_bias" in weights:
            out = out + weights["final_logits_bias"][0]
    elif config["tie_word_embeddings"]:
        out = linear(hidden, weights.trunk("model", FIRST), "embed_tokens", bias=False)
    else:
        out = linear(hidden, weights, "lm_head", bias=False)
    if config["model_type"] in GEMMA:
        return layers.soft_cap(out, config["final_logit_softcapping"])
    return out


def embedding(checkpoint: Checkpoint, ids: Sequence[int], pooling: str) -> Tensor:
    """float64 [hidden], scaled to length 1: the "last", the "first" or the "mean" row."""
    hidden = hidden_states(checkpoint, ids)
    pooled = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0)}[pooling]
    return pooled / torch.sqrt((pooled * pooled).sum())


def layer(x: Tensor, config: Config, w: Weights, i: int) -> Tensor:
    """Each half reads the normed row and adds to the row. Gemma also norms a half's output."""
    normed, maps = norm(x, config, w, "input_layernorm"), w.at("self_attn")
    if config["model_type"] in LATENT:
        mixed = layers.latent_attention(normed, config, maps)
    else:
        mixed = layers.grouped_attention(normed, config, maps, i)
    if config["model_type"] not in GEMMA:
        x = x + mixed
        normed = norm(x, config, w, "post_attention_layernorm")
        return x + feed_forward(normed, config, w.at("mlp"), i)
    x = x + norm(mixed, config, w, "post_attention_layernorm")
    normed = norm(x, config, w, "pre_feedforward_layernorm")
    fed = feed_forward(normed, config, w.at("mlp"), i)
    return x + norm(fed, config, w, "post_feedforward_layernorm")


def feed_forward(x: Tensor, config: Config, w: Weights, i: int) -> Tensor:
    """Experts in all layers, in every decoder_sparse_step-th except mlp_only_layers, or in none."""
    kind = config["model_type"]
    if kind == "gpt_oss":
        return layers.gpt_oss(x, config, w)
    if kind in LATENT and i >= config["first_k_dense_replace"]:
        return layers.deepseek(x, config, w)
    in_turn = kind == "qwen3_moe" and (i + 1) % config["decoder_sparse_step"] == 0
    if in_turn and i not in config["mlp_only_layers"]:
        return layers.qwen3_moe(x, config, w)
    activation = config["hidden_activation" if kind in GEMMA else "hidden_act"]
    bias = kind in ("llama", "deepseek_v2") and config["mlp_bias"]
    return layers.gated_mlp(x, w, activation, bias)


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
        x = x + layers.biased_attention(x, x, None, heads, maps, BERT_MAPS)
        x = layer_norm(x, layer, "attention.output.LayerNorm", eps)
        names = ("intermediate.dense", "output.dense")
        x = x + layers.plain_mlp(x, layer, names, config["hidden_act"])
        x = layer_norm(x, layer, "output.LayerNorm", eps)
    return x


def bart_side(config: Config, w: Weights, side: str, ids: Tensor, encoded: Tensor | None) -> Tensor:
    """An encoder's rows all see each other; a decoder's are causal, then attend to `encoded`."""
    own, heads = w.at(side), config[f"{side}_attention_heads"]
    scale = config["d_model"] ** 0.5 if config["scale_embedding"] else 1.0
    positions = own["embed_positions.weight"][torch.arange(len(ids)) + FIRST_POSITION]
    x = w[SHARED][ids] * scale + positions
    x = layer_norm(x, own, "layernorm_embedding", BART_EPS)
    sees = None if encoded is None else layers.causal(len(x))
    for i in range(config[f"{side}_layers"]):
        layer = own.at("layers", i)
        x = x + layers.biased_attention(x, x, sees, heads, layer.at("self_attn"), BART_MAPS)
        x = layer_norm(x, layer, "self_attn_layer_norm", BART_EPS)
        if encoded is not None:
            maps = layer.at("encoder_attn")
            x = x + layers.biased_attention(x, encoded, None, heads, maps, BART_MAPS)
            x = layer_norm(x, layer, "encoder_attn_layer_norm", BART_EPS)
        x = x + layers.plain_mlp(x, layer, ("fc1", "fc2"), config["activation_function"])
        x = layer_norm(x, layer, "final_layer_norm", BART_EPS)
    return x
