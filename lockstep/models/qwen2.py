"""Qwen2: llama with biases on q, k and v, and windows per layer."""

from dataclasses import replace

from lockstep.models import Config, llama
from lockstep.nn.decoder import DecoderSpec


def describe(config: Config) -> DecoderSpec:
    attn = replace(llama.attention(config), bias=True)
    return llama.windowed(config, llama.decoder(config, attn, llama.mlp(config)))
