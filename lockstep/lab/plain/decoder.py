"""The decoder-only models: embedding, layers, norm, head.

The families differ in three choices: how norms and residuals surround a layer's two halves
(`layer`), which attention (`attention`), which feed-forward (`feed_forward`).
"""

from torch import Tensor

from lockstep.lab.plain import moe
from lockstep.lab.plain.attention import Scoring, attend, causal, latent_attention, split_heads
from lockstep.lab.plain.layers import Config, Weights, gated_mlp, linear, rms_norm, soft_cap
from lockstep.lab.plain.rope import rotate_halves, rotation

GEMMA = ("gemma2", "gemma3_text")
LATENT = ("deepseek_v2", "deepseek_v3")
ONE_WINDOW = ("mistral", "qwen3_moe")  # in all layers, if any
FIRST = "embed_tokens.weight"
NORMED_HEADS = ("qwen3", "qwen3_moe", "gemma3_text")
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


def norm(x: Tensor, config: Config, weights: Weights, name: str) -> Tensor:
    """Gemma's files hold the weight less 1."""
    one = 1.0 if config["model_type"] in GEMMA else 0.0
    return rms_norm(x, one + weights[f"{name}.weight"], config["rms_norm_eps"])


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
    """x [n, hidden] → [n, hidden]. Latent, or grouped-query: many query heads share a key head."""
    kind = config["model_type"]
    if kind in LATENT:
        return latent_attention(x, config, w)
    bias = kind not in ("mistral", "qwen2") and config["attention_bias"]
    kv_heads = config["num_key_value_heads"]
    counts = {"q_proj": config["num_attention_heads"], "k_proj": kv_heads, "v_proj": kv_heads}
    rows = {name: linear(x, w, name, bias or kind == "qwen2") for name in counts}
    q, k, v = (split_heads(rows[name], count) for name, count in counts.items())
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
    sees = causal(len(x), window_of(config, i))
    mixed = attend(rotate_halves(q, turn), rotate_halves(k, turn), v, sees, scoring)
    return linear(mixed, w, "o_proj", bias)


def window_of(config: Config, i: int) -> int | None:
    """Keys that a row of this layer sees, itself included; None: all."""
    kind = config["model_type"]
    if kind in ONE_WINDOW or (kind != "llama" and config["layer_types"][i] == "sliding_attention"):
        return config["sliding_window"]  # type: ignore[no-any-return]
    return None


def feed_forward(x: Tensor, config: Config, w: Weights, i: int) -> Tensor:
    """Experts in all layers, in every decoder_sparse_step-th but mlp_only_layers, or in none."""
    kind = config["model_type"]
    if kind == "gpt_oss":
        return moe.gpt_oss(x, config, w)
    if kind in LATENT and i >= config["first_k_dense_replace"]:
        return moe.deepseek(x, config, w)
    in_turn = kind == "qwen3_moe" and (i + 1) % config["decoder_sparse_step"] == 0
    if in_turn and i not in config["mlp_only_layers"]:
        return moe.qwen3_moe(x, config, w)
    activation = config["hidden_activation" if kind in GEMMA else "hidden_act"]
    return gated_mlp(x, w, activation, kind in ("llama", "deepseek_v2") and config["mlp_bias"])
