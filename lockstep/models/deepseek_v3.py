"""DeepSeek V3: V2 with sigmoid scores, a correction to expert ranking, and either rope layout."""

from dataclasses import replace

from lockstep.models import Config, deepseek_v2, llama
from lockstep.nn.decoder import DecoderSpec
from lockstep.nn.mlp import MoeSpec
from lockstep.ops import Routing


def describe(config: Config) -> DecoderSpec:
    routing = Routing(
        config.num_experts_per_tok,
        config.n_routed_experts,
        "sigmoid",
        norm=config.norm_topk_prob,
        floor=1e-20,
        scale=config.routed_scaling_factor,
        groups=config.n_group,
        keep=config.topk_group,
    )
    dense = llama.mlp(config)
    attn = deepseek_v2.attention(config, interleaved=config.rope_interleave)
    moe = MoeSpec(routing, dense, correction=True)
    further = rf"model\.layers\.{config.num_hidden_layers}\..*"  # for multi-token prediction
    return replace(deepseek_v2.decoder(config, attn, dense, moe), unused=(further,))
