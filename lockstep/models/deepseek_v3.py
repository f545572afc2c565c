"""DeepSeek V3: V2 with sigmoid scores, a correction that steers the choice of experts, and a rope
in either layout."""

from __future__ import annotations

from typing import Any

from lockstep.models import deepseek_v2, llama
from lockstep.nn import decoder as nn
from lockstep.nn.decoder import Decoder, DecoderSpec
from lockstep.nn.moe import MoeSpec
from lockstep.nn.source import WeightSource
from lockstep.ops import Routing


def build(config: Any, weights: WeightSource) -> Decoder:
    weights.skip(rf"model\.layers\.{config.num_hidden_layers}\..*")  # predicts further tokens
    return nn.build(describe(config), weights)


def describe(config: Any) -> DecoderSpec:
    routing = Routing(
        config.num_experts_per_tok,
        config.n_routed_experts,
        "sigmoid",
        norm=config.norm_topk_prob,
        floor=1e-20,
        scale=config.routed_scaling_factor,
        groups=config.n_group,
        keep=config.topk_group,
    )
    dense = llama.mlp(config)
    attn = deepseek_v2.attention(config, interleaved=config.rope_interleave)
    return deepseek_v2.decoder(config, attn, dense, MoeSpec(routing, dense, correction=True))
