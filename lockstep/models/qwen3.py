"""Qwen3: llama with a norm on every query and key head, and windows per layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.models import llama
from lockstep.nn import decoder as nn
from lockstep.nn.attention import DenseSpec
from lockstep.nn.decoder import Decoder, DecoderSpec
from lockstep.nn.norm import RMSSpec
from lockstep.nn.source import WeightSource


def build(config: Any, weights: WeightSource) -> Decoder:
    return nn.build(describe(config), weights)


def describe(config: Any) -> DecoderSpec:
    return llama.decoder(config, attention(config), llama.mlp(config)).with_windows(
        llama.windows(config)
    )


def attention(config: Any) -> DenseSpec:
    bias = config.attention_bias
    return replace(
        llama.attention(config), qk_norm=RMSSpec(config.rms_norm_eps), bias=bias, out_bias=bias
    )
