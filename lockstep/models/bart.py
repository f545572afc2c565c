"""Bart: an encoder, and a decoder whose layers look at its rows.

A request begins with an encode step: its rows are the source's tokens, the encoder's layers keep
nothing, and the keys and values of every cross attention are stored. Decode steps read them. The
two kinds of step have groups of their own; the cross group is in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from lockstep.nn.attention import AttentionContext, Cross, Dense, DenseSpec, GroupLayer
from lockstep.nn.decoder import PostBlock, cached, groups_of
from lockstep.nn.embed import Embedding
from lockstep.nn.linear import Linear
from lockstep.nn.mlp import Elementwise, Mlp, activation
from lockstep.nn.norm import LayerNorm, layer_norm
from lockstep.nn.source import WeightSource
from lockstep.ops import Ops
from lockstep.types import GroupSpec, Layout, RuleError

OFFSET = 2  # position p has row p + 2 of the table
EPS = 1e-5


@dataclass(frozen=True, eq=False)
class Half:
    """The encoder or the decoder."""

    positions: Embedding
    norm: LayerNorm
    blocks: tuple[PostBlock, ...]

    def __call__(self, x: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        x = self.norm(x + self.positions(positions + OFFSET))
        for block in self.blocks:
            x = block(x, step)
        return x


@dataclass(frozen=True, eq=False)
class Bart:
    """`encode` once per request, in a step of `encoder_groups`; then ids, positions and steps of
    `groups` → hidden → logits."""

    words: Embedding
    encoder: Half
    decoder: Half
    head: Linear
    head_bias: Tensor | None
    ops: Ops

    def encode(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        """The encoder's rows [T, d], whose keys and values every decoder layer now has."""
        x = self.encoder(self.words(ids), positions, step)
        for at, cross in enumerate(self._crosses, start=len(self.encoder.blocks)):
            cross.store(x, at, step)
        return x

    def __call__(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        return self.decoder(self.words(ids), positions, step)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, d] → float32 [S, vocab]."""
        logits = self.head(hidden).float()
        return logits if self.head_bias is None else logits + self.head_bias

    def embed(self, hidden: Tensor, q_indptr: Sequence[int], how: str | None = None) -> Tensor:
        rule = "embeddings come from decoders and encoders"
        raise RuleError(rule, "an encoder-decoder", "Use it for generation")

    def groups(self, page_size: int = 16, kv_dtype: str = "float32") -> tuple[GroupSpec, ...]:
        """The groups of a decode step: the decoder's own keys, and the encoder's."""
        return cached(self._decode[0], page_size, kv_dtype)

    def encoder_groups(
        self, page_size: int = 16, kv_dtype: str = "float32"
    ) -> tuple[GroupSpec, ...]:
        """The groups of an encode step: the encoder's layers, fresh, and the cross group that is
        filled."""
        return cached(self._encode[0], page_size, kv_dtype)

    def fresh_groups(self) -> tuple[GroupSpec, ...]:
        rule = "embeddings come from decoders and encoders"
        raise RuleError(rule, "an encoder-decoder", "Use it for generation")

    @property
    def layer_map(self) -> tuple[GroupLayer, ...]:
        """Of a decode step: the self attentions, then the cross attentions."""
        return self._decode[1]

    @property
    def encoder_layer_map(self) -> tuple[GroupLayer, ...]:
        """Of an encode step: the encoder's attentions, then the cross attentions."""
        return self._encode[1]

    @property
    def max_position(self) -> int:
        """Positions, of sources and of answers, are below this."""
        return len(self.decoder.positions.weight) - OFFSET

    @property
    def generates(self) -> bool:
        return True

    @cached_property
    def _crosses(self) -> list[Cross]:
        return [b.cross for b in self.decoder.blocks if b.cross is not None]

    @cached_property
    def _decode(self) -> tuple[tuple[GroupSpec, ...], tuple[GroupLayer, ...]]:
        return groups_of([*(b.attn for b in self.decoder.blocks), *self._crosses])

    @cached_property
    def _encode(self) -> tuple[tuple[GroupSpec, ...], tuple[GroupLayer, ...]]:
        return groups_of([*(b.attn for b in self.encoder.blocks), *self._crosses])


def build(config: Any, weights: WeightSource) -> Bart:
    if not config.tie_word_embeddings:
        rule = "bart shares one embedding"
        raise RuleError(rule, "tie_word_embeddings=False", "Use a tied checkpoint")
    w, d = (weights if weights.has("shared.weight") else weights.at("model")), config.d_model
    weights.skip(r"lm_head\.weight")
    w.skip(r"(en|de)coder\.embed_tokens\.weight")
    table = w.rows("shared.weight", config.vocab_size, d)
    bias = (
        weights.tensor("final_logits_bias", 1, config.vocab_size)[0]
        if weights.has("final_logits_bias")
        else None
    )
    scale = math.sqrt(d) if config.scale_embedding else 1.0
    encoder, decoder = (half(config, w.at(side), side) for side in ("encoder", "decoder"))
    return Bart(
        words=Embedding(table, scale),
        encoder=encoder,
        decoder=decoder,
        head=Linear(w.pack(table), w.ops),
        head_bias=bias,
        ops=w.ops,
    )


def half(config: Any, w: WeightSource, side: str) -> Half:
    layers = config.encoder_layers if side == "encoder" else config.decoder_layers
    table = w.rows(
        "embed_positions.weight", config.max_position_embeddings + OFFSET, config.d_model
    )
    blocks = tuple(block(config, w.at("layers", i), side, i) for i in range(layers))
    return Half(Embedding(table), layer_norm(w, "layernorm_embedding", config.d_model, EPS), blocks)


def block(config: Any, w: WeightSource, side: str, index: int) -> PostBlock:
    decodes, d = side == "decoder", config.d_model
    heads, inner = (
        (config.decoder_attention_heads, config.decoder_ffn_dim)
        if decodes
        else (config.encoder_attention_heads, config.encoder_ffn_dim)
    )
    spec = DenseSpec(
        d, heads, heads, d // heads, 1 / math.sqrt(d // heads), bias=True, out_bias=True
    )
    own = w.at("self_attn")
    qkv = own.fused(("q_proj", "k_proj", "v_proj"), (d, d, d), d, bias=True)
    layout = Layout.DENSE if decodes else Layout.FRESH
    out = own.linear("out_proj", d, d, True)
    attn = Dense(index, spec, qkv, out, w.ops, layout=layout, causal=decodes)
    up, down = w.linear("fc1", inner, d, True), w.linear("fc2", d, inner, True)
    mlp = Mlp(up, down, Elementwise(activation(config.activation_function)), w.ops)
    norms = (
        layer_norm(w, "self_attn_layer_norm", d, EPS),
        layer_norm(w, "final_layer_norm", d, EPS),
    )
    if not decodes:
        return PostBlock(attn, norms[0], mlp, norms[1])
    other = w.at("encoder_attn")
    kv, q = (
        other.fused(("k_proj", "v_proj"), (d, d), d, bias=True),
        other.linear("q_proj", d, d, True),
    )
    cross = Cross(config.decoder_layers + index, spec, q, kv, other.linear("out_proj", d, d, True))
    return PostBlock(
        attn, norms[0], mlp, norms[1], cross, layer_norm(w, "encoder_attn_layer_norm", d, EPS)
    )
