"""Qwen2: llama with biases on q, k and v, and windows per layer."""

from dataclasses import replace
from typing import Any

from lockstep.models import llama
from lockstep.nn.decoder import DecoderSpec


def describe(config: Any) -> DecoderSpec:
    attn = replace(llama.attention(config), bias=True)
    return llama.decoder(config, attn, llama.mlp(config)).with_windows(llama.windows(config))
