"""Qwen3 MoE: qwen3 with experts in most layers and one window, if any, for all of them."""

from dataclasses import replace

from lockstep.models import Config, llama, qwen3
from lockstep.nn.decoder import DecoderSpec
from lockstep.nn.mlp import MoeSpec
from lockstep.ops import Routing


def describe(config: Config) -> DecoderSpec:
    routing = Routing(config.num_experts_per_tok, config.num_experts, norm=config.norm_topk_prob)
    dense = llama.mlp(config)
    moe = MoeSpec(routing, replace(dense, inner=config.moe_intermediate_size))
    mlps = [moe if sparse(config, i) else dense for i in range(config.num_hidden_layers)]
    attn = replace(qwen3.attention(config), window=config.sliding_window)
    return llama.decoder(config, attn, mlps)


def sparse(config: Config, layer: int) -> bool:
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
