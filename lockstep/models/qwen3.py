"""Qwen3: llama with a norm on every query and key head, and windows per layer."""

from dataclasses import replace

from lockstep.models import Config, llama
from lockstep.nn.attention import DenseSpec
from lockstep.nn.decoder import DecoderSpec
from lockstep.nn.layers import RMSSpec


def describe(config: Config) -> DecoderSpec:
    return llama.windowed(config, llama.decoder(config, attention(config), llama.mlp(config)))


def attention(config: Config) -> DenseSpec:
    norm, bias = RMSSpec(config.rms_norm_eps), config.attention_bias
    return replace(llama.attention(config), qk_norm=norm, bias=bias, out_bias=bias)
