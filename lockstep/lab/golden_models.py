"""The models of the golden file: one config.json per model_type, every field stated.

Data, and on purpose not shared with anybody: a change of these numbers would be a change of the
recorded answers. Sizes are small and odd enough that heads, windows, groups and experts matter.
"""

from __future__ import annotations

from typing import Any

VOCAB = 97
# names by which a checkpoint shows whether it is the trunk alone
PRESENT = frozenset({"model.embed_tokens.weight", "model.shared.weight", "bert.embeddings"})

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]

COMMON: dict[str, Any] = {
    "lockstep_states_every_field": True,
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-12,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
    "rope_parameters": ROPE,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 3,
    "is_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "decoder_start_token_id": None,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "rope_interleave": True,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
BART: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 6,
    "activation_function": "gelu",
    "scale_embedding": True,
    "is_encoder_decoder": True,
    "decoder_start_token_id": 1,
}
BERT: dict[str, Any] = {
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "is_decoder": False,
    "add_cross_attention": False,
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {"sliding_window": 11, "layer_types": ALTERNATE},
    "qwen3": {"head_dim": 24, "sliding_window": 13, "layer_types": ALTERNATE},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    },
    "gemma2": {
        "sliding_window": 9,
        "layer_types": ALTERNATE,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma3_text": {
        "sliding_window": 9,
        "layer_types": ALTERNATE,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    },
    "gpt_oss": {
        "sliding_window": 9,
        "layer_types": ALTERNATE,
        "attention_bias": True,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "deepseek_v2": {
        **MLA,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "deepseek_v3": {**MLA, "q_lora_rank": 40, "n_shared_experts": 1, "attention_bias": True},
    "bart": BART,
    "bert": BERT,
}
MODELS = {
    name: {**COMMON, **different, "model_type": name} for name, different in DIFFERENT.items()
}
