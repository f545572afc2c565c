"""DeepSeek V2: latent attention, experts restricted to the best groups, and a shared expert."""

import math
from dataclasses import replace

from lockstep.models import Config, llama
from lockstep.nn import rope
from lockstep.nn.attention import LatentSpec
from lockstep.nn.decoder import DecoderSpec
from lockstep.nn.mlp import MlpSpec, MoeSpec
from lockstep.ops import Routing
from lockstep.types import check_one_of

METHODS = ("greedy", "group_limited_greedy")


def describe(config: Config) -> DecoderSpec:
    check_one_of(METHODS, "topk_method", config.topk_method, "Check config.json")
    top_k, experts = config.num_experts_per_tok, config.n_routed_experts
    routing = Routing(top_k, experts, scale=config.routed_scaling_factor)
    if config.topk_method == "group_limited_greedy":
        routing = replace(routing, groups=config.n_group, keep=config.topk_group)
    dense = replace(llama.mlp(config), bias=config.mlp_bias)
    return decoder(config, attention(config, interleaved=True), dense, MoeSpec(routing, dense))


def attention(config: Config, interleaved: bool) -> LatentSpec:
    """Scales by the whole key's size, and by yarn's temperature where the config asks for it."""
    params = config.rope_parameters
    scale = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    if params["rope_type"] != "default" and params.get("mscale_all_dim"):
        scale *= rope.mscale(params["factor"], params["mscale_all_dim"]) ** 2
    width = config.qk_rope_head_dim
    return LatentSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        rank=config.kv_lora_rank,
        d_nope=config.qk_nope_head_dim,
        d_rope=width,
        d_v=config.v_head_dim,
        scale=scale,
        rope=rope.make(params, width, config.max_position_embeddings, interleaved),
        q_rank=config.q_lora_rank,
        bias=config.attention_bias,
    )


def decoder(config: Config, attn: LatentSpec, dense: MlpSpec, moe: MoeSpec) -> DecoderSpec:
    """The first layers are dense; others have routed experts, and the shared ones as one MLP."""
    inner = config.moe_intermediate_size
    shared = replace(dense, inner=inner * config.n_shared_experts)
    moe = replace(moe, expert=replace(dense, inner=inner, bias=False), shared=shared)
    layers, first = config.num_hidden_layers, config.first_k_dense_replace
    return llama.decoder(config, attn, [dense if i < first else moe for i in range(layers)])
