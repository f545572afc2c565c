"""The decoder-only models: embedding, layers, norm, head. One function per model_type: its layer.

Ten families are variations of three choices: how norms and residuals surround a layer's two halves
(`pre_norm`, `sandwich`), which attention, which feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lockstep.lab.plain import moe
from lockstep.lab.plain.attention import GroupedQuery, grouped_query
from lockstep.lab.plain.layers import Config, Weights, gated_mlp, linear, rms_norm, soft_cap
from lockstep.lab.plain.mla import latent_attention

Half = Callable[[Tensor], Tensor]
GEMMA = ("gemma2", "gemma3_text")


def hidden_states(config: Config, weights: Weights, ids: Tensor) -> Tensor:
    """ids [n] → [n, hidden]."""
    w = trunk(weights)
    x = w["embed_tokens.weight"][ids]
    if config["model_type"] in GEMMA:
        x = x * config["hidden_size"] ** 0.5
    for i in range(config["num_hidden_layers"]):
        x = LAYERS[config["model_type"]](x, config, w.at("layers", i), i)
    return norm(x, config, w, "norm")


def logits(config: Config, weights: Weights, hidden: Tensor) -> Tensor:
    """hidden [n, hidden] → [n, vocabulary]: by the embedding where it is tied."""
    if config["tie_word_embeddings"]:
        out = linear(hidden, trunk(weights), "embed_tokens", bias=False)
    else:
        out = linear(hidden, weights, "lm_head", bias=False)
    if config["model_type"] in GEMMA:
        return soft_cap(out, config["final_logit_softcapping"])
    return out


def trunk(weights: Weights) -> Weights:
    """A checkpoint of the trunk alone has no "model." before its names."""
    return weights if "embed_tokens.weight" in weights else weights.at("model")


def norm(x: Tensor, config: Config, weights: Weights, name: str) -> Tensor:
    """Gemma's files hold the weight less 1."""
    one = 1.0 if config["model_type"] in GEMMA else 0.0
    return rms_norm(x, one + weights[f"{name}.weight"], config["rms_norm_eps"])


def pre_norm(x: Tensor, config: Config, w: Weights, attention: Half, feed_forward: Half) -> Tensor:
    """Each half reads the normed row and adds to the row."""
    x = x + attention(norm(x, config, w, "input_layernorm"))
    return x + feed_forward(norm(x, config, w, "post_attention_layernorm"))


def sandwich(x: Tensor, config: Config, w: Weights, attention: Half, feed_forward: Half) -> Tensor:
    """Gemma: what a half adds is normed too."""
    mixed = attention(norm(x, config, w, "input_layernorm"))
    x = x + norm(mixed, config, w, "post_attention_layernorm")
    fed = feed_forward(norm(x, config, w, "pre_feedforward_layernorm"))
    return x + norm(fed, config, w, "post_feedforward_layernorm")


def window_of(config: Config, layer: int) -> int | None:
    """Keys that a row of this layer sees, itself included; None: all."""
    sliding = config["layer_types"][layer] == "sliding_attention"
    return int(config["sliding_window"]) if sliding else None


def dense_layer(
    x: Tensor, config: Config, w: Weights, kind: GroupedQuery, mlp_bias: bool = False
) -> Tensor:
    """Grouped-query attention and a gated feed-forward, each behind its norm."""
    return pre_norm(
        x,
        config,
        w,
        lambda h: grouped_query(h, config, w.at("self_attn"), kind),
        lambda h: gated_mlp(h, w.at("mlp"), config["hidden_act"], mlp_bias),
    )


def llama(x: Tensor, config: Config, w: Weights, layer: int) -> Tensor:
    """The plain decoder."""
    bias = config["attention_bias"]
    kind = GroupedQuery(config["rope_parameters"], qkv_bias=bias, out_bias=bias)
    return dense_layer(x, config, w, kind, config["mlp_bias"])


def mistral(x: Tensor, config: Config, w: Weights, layer: int) -> Tensor:
    """llama with a window in all layers, if any."""
    kind = GroupedQuery(config["rope_parameters"], window=config["sliding_window"])
    return dense_layer(x, config, w, kind)


def qwen2(x: Tensor, config: Config, w: Weights, layer: int) -> Tensor:
    """llama with biases on queries, keys and values, and windows in some layers."""
    window = window_of(config, layer)
    kind = GroupedQuery(config["rope_parameters"], window=window, qkv_bias=True)
    return dense_layer(x, config, w, kind)


def qwen3(x: Tensor, config: Config, w: Weights, layer: int) -> Tensor:
    """llama with a norm on every query and key head, and windows in some layers."""
    return dense_layer(x, config, w, qwen3_attention(config, window_of(config, layer)))


def qwen3_attention(config: Config, window: int | None) -> GroupedQuery:
    """Queries and keys are normed head by head, before they turn."""
    bias = config["attention_bias"]
    return GroupedQuery(
        config["rope_parameters"], window=window, qkv_bias=bias, out_bias=bias, qk_norm=True
    )


def qwen3_moe(x: Tensor, config: Config, w: Weights, layer: int) -> Tensor:
    """qwen3 with experts in every decoder_sparse_step-th layer but mlp_only_layers, one window."""
    kind = qwen3_attention(config, config["sliding_window"])
    if layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"]:
        return dense_layer(x, config, w, kind)
    return pre_norm(
        x,
        config,
        w,
        lambda h: grouped_query(h, config, w.at("self_attn"), kind),
        lambda h: moe.qwen3_moe(h, config, w.at("mlp")),
    )


def gemma2(x: Tensor, config: Config, w: Weights, layer: int) -> Tensor:
    """Norms all around, capped scores, a scale that the config states, windows in some layers."""
    kind = GroupedQuery(
        config["rope_parameters"],
        window=window_of(config, layer),
        qkv_bias=config["attention_bias"],
        out_bias=config["attention_bias"],
        scale=config["query_pre_attn_scalar"] ** -0.5,
        cap=config["attn_logit_softcapping"],
    )
    return gemma_layer(x, config, w, kind)


def gemma3_text(x: Tensor, config: Config, w: Weights, layer: int) -> Tensor:
    """gemma2 with normed queries and keys, scores without a cap, a rope per kind of layer."""
    kind = GroupedQuery(
        config["rope_parameters"][config["layer_types"][layer]],
        window=window_of(config, layer),
        qkv_bias=config["attention_bias"],
        out_bias=config["attention_bias"],
        qk_norm=True,
        norm_plus_one=True,
        scale=config["query_pre_attn_scalar"] ** -0.5,
    )
    return gemma_layer(x, config, w, kind)


def gemma_layer(x: Tensor, config: Config, w: Weights, kind: GroupedQuery) -> Tensor:
    """Grouped-query attention and a gated feed-forward, each between two norms."""
    return sandwich(
        x,
        config,
        w,
        lambda h: grouped_query(h, config, w.at("self_attn"), kind),
        lambda h: gated_mlp(h, w.at("mlp"), config["hidden_activation"]),
    )


def gpt_oss(x: Tensor, config: Config, w: Weights, layer: int) -> Tensor:
    """Sinks in every head, windows in some layers, experts in all."""
    kind = GroupedQuery(
        config["rope_parameters"],
        window=window_of(config, layer),
        qkv_bias=config["attention_bias"],
        out_bias=config["attention_bias"],
        sinks=True,
    )
    return pre_norm(
        x,
        config,
        w,
        lambda h: grouped_query(h, config, w.at("self_attn"), kind),
        lambda h: moe.gpt_oss(h, config, w.at("mlp")),
    )


def deepseek_v2(x: Tensor, config: Config, w: Weights, layer: int) -> Tensor:
    """Latent attention; dense feed-forwards in the first layers, experts in the others."""
    return deepseek(x, config, w, layer, mlp_bias=config["mlp_bias"])


def deepseek_v3(x: Tensor, config: Config, w: Weights, layer: int) -> Tensor:
    """V2 with another router, and without biases in the feed-forward."""
    return deepseek(x, config, w, layer, mlp_bias=False)


def deepseek(x: Tensor, config: Config, w: Weights, layer: int, mlp_bias: bool) -> Tensor:
    """A layer of either version."""

    def feed_forward(h: Tensor) -> Tensor:
        if layer < config["first_k_dense_replace"]:
            return gated_mlp(h, w.at("mlp"), config["hidden_act"], mlp_bias)
        return moe.deepseek(h, config, w.at("mlp"))

    def attention(h: Tensor) -> Tensor:
        return latent_attention(h, config, w.at("self_attn"))

    return pre_norm(x, config, w, attention, feed_forward)


LAYERS: dict[str, Callable[[Tensor, Config, Weights, int], Tensor]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
}
