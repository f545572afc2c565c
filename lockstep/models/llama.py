"""Llama: the plain decoder that most others are variants of. `attention`, `mlp` and `decoder` read
what all their configs have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.nn import decoder as nn
from lockstep.nn import rope
from lockstep.nn.attention import DenseSpec, LatentSpec
from lockstep.nn.decoder import BlockSpec, Decoder, DecoderSpec
from lockstep.nn.mlp import MlpSpec
from lockstep.nn.moe import MoeSpec
from lockstep.nn.norm import RMSSpec
from lockstep.nn.source import WeightSource


def build(config: Any, weights: WeightSource) -> Decoder:
    return nn.build(describe(config), weights)


def describe(config: Any) -> DecoderSpec:
    attn = replace(attention(config), bias=config.attention_bias, out_bias=config.attention_bias)
    return decoder(config, attn, replace(mlp(config), bias=config.mlp_bias))


def head_dim(config: Any) -> int:
    """Some configs of a family state it, the others imply it."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def attention(config: Any, rope_parameters: Any = None) -> DenseSpec:
    """Grouped-query attention with rope, no biases, all keys."""
    d = head_dim(config)
    turn = rope.make(rope_parameters or config.rope_parameters, d, config.max_position_embeddings)
    return DenseSpec(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        d,
        1 / math.sqrt(d),
        turn,
    )


def mlp(config: Any) -> MlpSpec:
    return MlpSpec(config.hidden_size, config.intermediate_size, config.hidden_act)


def decoder(
    config: Any, attn: DenseSpec | LatentSpec, mlps: MlpSpec | Sequence[MlpSpec | MoeSpec]
) -> DecoderSpec:
    """A decoder whose layers share an attention, with one feed-forward for all layers or one for
    each."""
    each = [mlps] * config.num_hidden_layers if isinstance(mlps, MlpSpec) else mlps
    blocks = tuple(BlockSpec(attn, feed) for feed in each)
    length = rope.longest(config.rope_parameters, config.max_position_embeddings)
    return DecoderSpec(
        config.vocab_size,
        config.hidden_size,
        length,
        blocks,
        RMSSpec(config.rms_norm_eps),
        config.tie_word_embeddings,
    )


def windows(config: Any) -> list[int | None]:
    """Keys a row of each layer sees. transformers' sliding_window = w shows positions above p - w:
    w keys, itself included, as ours."""
    return [
        config.sliding_window if kind == "sliding_attention" else None
        for kind in config.layer_types
    ]
