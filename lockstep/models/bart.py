"""Bart: an encoder, and a decoder whose layers attend to its rows. A request begins with an encode
step: the encoder's layers cache nothing, and the keys and values of every cross attention are
stored for the decode steps; the cross group is in both kinds of step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor

from lockstep.models import Config, Spec
from lockstep.nn.attention import Attention, AttentionContext, Cross, DenseSpec, Grouped, groups_of
from lockstep.nn.decoder import Model, PostBlock, PostStack
from lockstep.nn.layers import Embedding, LayerNorm, Linear, WeightSource, layer_norm
from lockstep.nn.mlp import MlpSpec
from lockstep.types import Layout, RuleError

NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")
OFFSET = 2  # position p has row p + 2 of the table
EPS = 1e-5


@dataclass(frozen=True, eq=False)
class Bart(Model):
    """`encode` runs once per request, in a step of `encoder_groups`; then steps of `groups`, with
    the self attentions before the cross ones. Source and answer both start at position 0."""

    encodes = position_table = True
    words: Embedding
    encoder: PostStack
    decoder: PostStack
    head_bias: Tensor | None

    def encode(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        """Returns the encoder's rows [T, d], after storing their keys for all decoder layers."""
        x = self.encoder(self.words(ids), positions + OFFSET, step)
        for at, cross in enumerate(self._crosses, start=len(self.encoder.blocks)):
            cross.store(x, at, step)
        return x

    def __call__(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        return self.decoder(self.words(ids), positions + OFFSET, step)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits if self.head_bias is None else logits.float() + self.head_bias

    @property
    def attentions(self) -> Sequence[Attention]:
        return [*(block.attn for block in self.decoder.blocks), *self._crosses]

    def encoder_groups(self, page_size: int, kv_dtype: str) -> Grouped:
        """Returns an encode step's groups (fresh ones of the encoder, the cross group it fills) and
        its layer map: the encoder's attentions, then the cross attentions."""
        layers: list[Attention] = [block.attn for block in self.encoder.blocks]
        return groups_of([*layers, *self._crosses], page_size, kv_dtype)

    @cached_property
    def _crosses(self) -> list[Cross]:
        return [block.cross for block in self.decoder.blocks if block.cross is not None]


def describe(config: Config) -> Spec:
    if not config.tie_word_embeddings:
        got = "tie_word_embeddings=False"
        raise RuleError("the embeddings of bart are tied", got, "Use a tied checkpoint")
    return Spec(partial(build, config))


def build(config: Config, weights: WeightSource) -> Bart:
    d, vocab_size = config.d_model, config.vocab_size
    w = weights if weights.has("shared.weight") else weights.at("model")
    weights.skip(r"lm_head\.weight")
    w.skip(r"(en|de)coder\.embed_tokens\.weight")
    table = w.rows("shared.weight", vocab_size, d)
    bias = None
    if weights.has("final_logits_bias"):
        bias = weights.tensor("final_logits_bias", 1, vocab_size)[0]
    return Bart(
        ops=w.ops,
        max_position=config.max_position_embeddings,
        words=Embedding(table, w.ops, math.sqrt(d) if config.scale_embedding else 1.0),
        encoder=half(config, w.at("encoder"), "encoder"),
        decoder=half(config, w.at("decoder"), "decoder"),
        head=Linear(w.pack(table), w.ops),
        head_bias=bias,
    )


def half(config: Config, w: WeightSource, side: str) -> PostStack:
    positions = config.max_position_embeddings + OFFSET
    table = w.rows("embed_positions.weight", positions, config.d_model)
    layers = range(getattr(config, f"{side}_layers"))
    blocks = tuple(block(config, w.at("layers", i), side, i) for i in layers)
    norm = layer_norm(w.at("layernorm_embedding"), config.d_model, EPS)
    return PostStack(Embedding(table, w.ops), norm, blocks)


def block(config: Config, w: WeightSource, side: str, index: int) -> PostBlock:
    def norm(name: str) -> LayerNorm:
        return layer_norm(w.at(name), d, EPS)

    d, inner = config.d_model, getattr(config, f"{side}_ffn_dim")
    spec = DenseSpec.plain(d, getattr(config, f"{side}_attention_heads"))
    attn = spec.build(w.at("self_attn"), index, NAMES)
    mlp = MlpSpec(d, inner, config.activation_function, bias=True).ungated(w, "fc1", "fc2")
    plain = PostBlock(attn, norm("self_attn_layer_norm"), mlp, norm("final_layer_norm"))
    if side == "encoder":
        return replace(plain, attn=replace(attn, layout=Layout.FRESH))
    other = w.at("encoder_attn")
    kv = other.fused(dict.fromkeys(("k_proj", "v_proj"), d), d, bias=True)
    q, out = other.linear("q_proj", d, d, True), other.linear("out_proj", d, d, True)
    cross = Cross(config.decoder_layers + index, spec, q=q, kv=kv, out=out)
    return replace(plain, cross=cross, cross_norm=norm("encoder_attn_layer_norm"))
