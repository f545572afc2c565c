"""Qwen3 MoE: qwen3 with experts in most layers and one window, if any, for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.models import llama, qwen3
from lockstep.nn import decoder as nn
from lockstep.nn.decoder import Decoder, DecoderSpec
from lockstep.nn.mlp import MlpSpec
from lockstep.nn.moe import MoeSpec
from lockstep.nn.source import WeightSource
from lockstep.ops import Routing


def build(config: Any, weights: WeightSource) -> Decoder:
    return nn.build(describe(config), weights)


def describe(config: Any) -> DecoderSpec:
    routing = Routing(config.num_experts_per_tok, config.num_experts, norm=config.norm_topk_prob)
    dense = llama.mlp(config)
    moe = MoeSpec(routing, replace(dense, inner=config.moe_intermediate_size))
    mlps: list[MlpSpec | MoeSpec] = [
        moe if sparse(config, i) else dense for i in range(config.num_hidden_layers)
    ]
    spec = llama.decoder(config, qwen3.attention(config), mlps)
    return spec.with_windows([config.sliding_window] * config.num_hidden_layers)


def sparse(config: Any, layer: int) -> bool:
    """Whether a layer has experts."""
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
