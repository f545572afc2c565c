"""Mistral: llama with one window for all layers."""

from lockstep.models import Config, llama
from lockstep.nn.decoder import DecoderSpec


def describe(config: Config) -> DecoderSpec:
    spec = llama.decoder(config, llama.attention(config), llama.mlp(config))
    return spec.with_windows([config.sliding_window] * config.num_hidden_layers)
