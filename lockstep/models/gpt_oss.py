"""gpt-oss: sinks in every head, windows on every other layer, and experts kept in one tensor with
gate and up columns taking turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lockstep.models import llama
from lockstep.nn import decoder as nn
from lockstep.nn.decoder import Decoder, DecoderSpec
from lockstep.nn.mlp import ClampedGlu, Mlp
from lockstep.nn.moe import MoeSpec, Routing
from lockstep.nn.source import Weights


def build(config: Any, weights: Weights) -> Decoder:
    return nn.build(describe(config), weights)


def describe(config: Any) -> DecoderSpec:
    bias = config.attention_bias
    attn = replace(llama.attention(config), bias=bias, out_bias=bias, sinks=True)
    routing = Routing(config.num_experts_per_tok, config.num_local_experts, score="chosen")
    act = ClampedGlu(config.swiglu_alpha, config.swiglu_limit)
    experts = Experts(config.num_local_experts, config.hidden_size, config.intermediate_size, act)
    moe = MoeSpec(routing, llama.mlp(config), router="router", router_bias=True, load=experts)
    return llama.decoder(config, attn, [moe] * config.num_hidden_layers).with_windows(
        llama.windows(config)
    )


@dataclass(frozen=True)
class Experts:
    """All experts of a layer, from tensors of [experts, in, out]."""

    count: int
    hidden: int
    inner: int
    act: ClampedGlu

    def __call__(self, w: Weights) -> tuple[Mlp, ...]:
        w, n = w.at("experts"), self.count
        up, up_bias = (
            w.tensor("gate_up_proj", n, self.hidden, 2 * self.inner),
            w.tensor("gate_up_proj_bias", n, 2 * self.inner),
        )
        down, down_bias = (
            w.tensor("down_proj", n, self.inner, self.hidden),
            w.tensor("down_proj_bias", n, self.hidden),
        )
        gate_first = [torch.cat((t[..., ::2], t[..., 1::2]), -1) for t in (up, up_bias)]
        return tuple(
            Mlp(w.pack(a.T, b), w.pack(c.T, d), self.act)
            for a, b, c, d in zip(*gate_first, down, down_bias, strict=True)
        )
