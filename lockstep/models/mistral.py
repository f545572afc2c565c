"""Mistral: llama with one window for all layers."""

from dataclasses import replace

from lockstep.models import Config, llama
from lockstep.nn.decoder import DecoderSpec


def describe(config: Config) -> DecoderSpec:
    attn = replace(llama.attention(config), window=config.sliding_window)
    return llama.decoder(config, attn, llama.mlp(config))
