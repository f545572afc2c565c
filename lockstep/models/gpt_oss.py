"""gpt-oss: sinks in every head, windows on every other layer, and experts stored in one tensor with
gate and up columns interleaved."""

from dataclasses import dataclass, replace

import torch

from lockstep.models import Config, llama
from lockstep.nn.decoder import DecoderSpec
from lockstep.nn.layers import WeightSource
from lockstep.nn.mlp import ClampedGlu, Experts, MlpSpec, MoeSpec
from lockstep.ops import Routing


def describe(config: Config) -> DecoderSpec:
    bias = config.attention_bias
    attn = replace(llama.attention(config), bias=bias, out_bias=bias, sinks=True)
    routing = Routing(config.num_experts_per_tok, config.num_local_experts, score="chosen")
    moe = MoeSpec(
        routing=routing,
        expert=llama.mlp(config),
        router="router",
        router_bias=True,
        gate=ClampedGlu(config.swiglu_alpha, config.swiglu_limit),
        load=Stacked(),
    )
    return llama.windowed(config, llama.decoder(config, attn, [moe] * config.num_hidden_layers))


@dataclass(frozen=True)
class Stacked:
    """Reads all experts of a layer from tensors of [experts, in, out]. A function's repr, of which
    the certificate has a digest, would contain an address."""

    def __call__(self, w: WeightSource, n: int, expert: MlpSpec) -> Experts:
        hidden, inner = expert.hidden, expert.inner
        up = w.tensor("gate_up_proj", n, hidden, 2 * inner)
        up_bias = w.tensor("gate_up_proj_bias", n, 2 * inner)
        down = w.tensor("down_proj", n, inner, hidden)
        down_bias = w.tensor("down_proj_bias", n, hidden)
        up, up_bias = (torch.cat((t[..., ::2], t[..., 1::2]), -1) for t in (up, up_bias))
        return (up.transpose(1, 2), up_bias), (down.transpose(1, 2), down_bias)
