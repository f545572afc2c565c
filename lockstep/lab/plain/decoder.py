"""The decoder-only models: embedding, layers, norm, head.

The families differ in three choices: how norms and residuals surround a layer's two halves
(`layer`), which attention (`attention`), which feed-forward (`feed_forward`).
"""

from torch import Tensor

from lockstep.lab.plain import layers
from lockstep.lab.plain.attention import ONE_WINDOW, grouped_attention, latent_attention
from lockstep.lab.plain.layers import GEMMA, Config, Weights, linear, norm, soft_cap

LATENT = ("deepseek_v2", "deepseek_v3")
FIRST = "embed_tokens.weight"
MODEL_TYPES = ("llama", "qwen2", "gpt_oss", *ONE_WINDOW, "qwen3", *GEMMA, *LATENT)


def hidden_states(config: Config, weights: Weights, ids: Tensor) -> Tensor:
    """ids [n] → [n, hidden]."""
    w = weights.trunk("model", FIRST)
    x = w[FIRST][ids]
    if config["model_type"] in GEMMA:
        x = x * config["hidden_size"] ** 0.5
    for i in range(config["num_hidden_layers"]):
        x = layer(x, config, w.at("layers", i), i)
    return norm(x, config, w, "norm")


def logits(config: Config, weights: Weights, hidden: Tensor) -> Tensor:
    """hidden [n, hidden] → [n, vocabulary]: by the embedding where it is tied."""
    if config["tie_word_embeddings"]:
        out = linear(hidden, weights.trunk("model", FIRST), "embed_tokens", bias=False)
    else:
        out = linear(hidden, weights, "lm_head", bias=False)
    if config["model_type"] in GEMMA:
        return soft_cap(out, config["final_logit_softcapping"])
    return out


def layer(x: Tensor, config: Config, w: Weights, i: int) -> Tensor:
    """Each half reads the normed row and adds to the row. Gemma norms what a half adds, too."""
    mixed = attention(norm(x, config, w, "input_layernorm"), config, w.at("self_attn"), i)
    if config["model_type"] not in GEMMA:
        x = x + mixed
        normed = norm(x, config, w, "post_attention_layernorm")
        return x + feed_forward(normed, config, w.at("mlp"), i)
    x = x + norm(mixed, config, w, "post_attention_layernorm")
    normed = norm(x, config, w, "pre_feedforward_layernorm")
    fed = feed_forward(normed, config, w.at("mlp"), i)
    return x + norm(fed, config, w, "post_feedforward_layernorm")


def attention(x: Tensor, config: Config, w: Weights, i: int) -> Tensor:
    if config["model_type"] in LATENT:
        return latent_attention(x, config, w)
    return grouped_attention(x, config, w, i)


def feed_forward(x: Tensor, config: Config, w: Weights, i: int) -> Tensor:
    """Experts in all layers, in every decoder_sparse_step-th but mlp_only_layers, or in none."""
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
