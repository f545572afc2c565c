"""Llama: the plain decoder that most others are variants of. `attention`, `mlp` and `decoder` read
the fields that all their configs have."""

import math
from collections.abc import Sequence
from dataclasses import replace

from lockstep.models import Config
from lockstep.nn import rope
from lockstep.nn.attention import DenseSpec, LatentSpec
from lockstep.nn.decoder import BlockSpec, DecoderSpec
from lockstep.nn.layers import RMSSpec
from lockstep.nn.mlp import MlpSpec, MoeSpec
from lockstep.types import RuleError


def describe(config: Config) -> DecoderSpec:
    attn = replace(attention(config), bias=config.attention_bias, out_bias=config.attention_bias)
    return decoder(config, attn, replace(mlp(config), bias=config.mlp_bias))


def attention(config: Config, rope_parameters: rope.Params | None = None) -> DenseSpec:
    """Grouped-query attention with rope, no biases, all keys."""
    stated = getattr(config, "head_dim", None)  # if absent, it is hidden_size over heads
    d = int(stated or config.hidden_size // config.num_attention_heads)
    params = rope_parameters or config.rope_parameters
    return DenseSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=d,
        scale=1 / math.sqrt(d),
        rope=rope.make(params, d, config.max_position_embeddings),
    )


def mlp(config: Config) -> MlpSpec:
    return MlpSpec(config.hidden_size, config.intermediate_size, config.hidden_act)


def decoder(
    config: Config, attn: DenseSpec | LatentSpec, mlps: MlpSpec | Sequence[MlpSpec | MoeSpec]
) -> DecoderSpec:
    """Returns a decoder with one attention for all layers, one feed-forward for all or one each."""
    each = [mlps] * config.num_hidden_layers if isinstance(mlps, MlpSpec) else mlps
    return of_blocks(config, [BlockSpec(attn, mlp) for mlp in each])


def of_blocks(config: Config, blocks: Sequence[BlockSpec]) -> DecoderSpec:
    """Returns a decoder of these blocks, with the other fields that all these configs have."""
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden=config.hidden_size,
        max_position=rope.longest(config.rope_parameters, config.max_position_embeddings),
        blocks=tuple(blocks),
        norm=RMSSpec(config.rms_norm_eps),
        tied=config.tie_word_embeddings,
    )


def windowed(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """Sets the config's window in the layers that layer_types names: transformers' w counts the row
    itself, as ours does."""
    kinds, blocks = config.layer_types, list(spec.blocks)
    if len(kinds) != len(blocks):
        got = f"{len(kinds)} types, {len(blocks)} layers"
        raise RuleError("layer_types has one entry per layer", got, "Check config.json")
    for i, block in enumerate(blocks):
        if kinds[i] == "sliding_attention":
            blocks[i] = replace(block, attn=replace(block.attn, window=config.sliding_window))
    return replace(spec, blocks=tuple(blocks))
