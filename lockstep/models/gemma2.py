"""Gemma 2: norms of 1 + w before and after every part, soft caps on scores and logits, windows on
every other layer."""

import math
from dataclasses import replace

from lockstep.models import Config, llama
from lockstep.nn.attention import DenseSpec
from lockstep.nn.decoder import BlockSpec, DecoderSpec
from lockstep.nn.layers import RMSSpec
from lockstep.nn.mlp import MlpSpec
from lockstep.nn.rope import Params
from lockstep.types import RuleError


def describe(config: Config) -> DecoderSpec:
    attn = replace(attention(config), soft_cap=config.attn_logit_softcapping)
    return decoder(config, [attn] * config.num_hidden_layers)


def attention(config: Config, rope_parameters: Params | None = None) -> DenseSpec:
    """Scales scores by the config's query_pre_attn_scalar, not by the head size."""
    if config.use_bidirectional_attention:
        rule = "a decoder is causal"
        raise RuleError(rule, "use_bidirectional_attention", "Use a causal checkpoint")
    bias = config.attention_bias
    scale = 1 / math.sqrt(config.query_pre_attn_scalar)
    return replace(llama.attention(config, rope_parameters), scale=scale, bias=bias, out_bias=bias)


def decoder(config: Config, attns: list[DenseSpec]) -> DecoderSpec:
    mlp = MlpSpec(config.hidden_size, config.intermediate_size, config.hidden_activation)
    blocks = [BlockSpec(attn, mlp, sandwich=True) for attn in attns]
    spec = replace(
        llama.of_blocks(config, blocks),
        norm=RMSSpec(config.rms_norm_eps, plus_one=True),
        embed_scale=math.sqrt(config.hidden_size),
        logit_cap=config.final_logit_softcapping,
    )
    return llama.windowed(config, spec)
