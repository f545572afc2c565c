"""Gemma 3, text: gemma 2 with norms on query and key heads instead of soft caps, and a rope of its
own for windowed layers."""

from dataclasses import replace

from lockstep.models import Config, gemma2
from lockstep.nn.decoder import DecoderSpec
from lockstep.nn.layers import RMSSpec
from lockstep.types import RuleError


def describe(config: Config) -> DecoderSpec:
    if config.attn_logit_softcapping is not None:
        got = f"attn_logit_softcapping={config.attn_logit_softcapping}"
        raise RuleError("gemma 3 has no soft cap on scores", got, "Remove it from config.json")
    norm = RMSSpec(config.rms_norm_eps, plus_one=True)
    kinds = {}
    for kind in set(config.layer_types):
        kinds[kind] = replace(gemma2.attention(config, config.rope_parameters[kind]), qk_norm=norm)
    return gemma2.decoder(config, [kinds[k] for k in config.layer_types])
