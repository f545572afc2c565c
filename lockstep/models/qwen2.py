"""Qwen2: llama with biases on q, k and v, and windows per layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.models import llama
from lockstep.nn import decoder as nn
from lockstep.nn.decoder import Decoder, DecoderSpec
from lockstep.nn.source import WeightSource


def build(config: Any, weights: WeightSource) -> Decoder:
    return nn.build(describe(config), weights)


def describe(config: Any) -> DecoderSpec:
    attn = replace(llama.attention(config), bias=True)
    return llama.decoder(config, attn, llama.mlp(config)).with_windows(llama.windows(config))
