"""The blocks and the decoder they make up: embedding, blocks, norm, head.

`DecoderSpec` is what a model file makes of a config: frozen, comparable, a variant is a `replace`
of it. `Decoder` holds the weights and maps rows to rows; it is told ids and positions and never a
request. Encoders and encoder-decoders build theirs from `PostBlock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from torch import Tensor

from lockstep.nn.attention import (
    Attention,
    AttentionContext,
    CosSins,
    Cross,
    Dense,
    DenseSpec,
    GroupLayer,
    Latent,
    LatentSpec,
    merge,
)
from lockstep.nn.embed import Embedding, pool
from lockstep.nn.linear import Linear
from lockstep.nn.mlp import Mlp, MlpSpec
from lockstep.nn.moe import Moe, MoeSpec
from lockstep.nn.norm import LayerNorm, RMSNorm, RMSSpec
from lockstep.nn.rope import Rope
from lockstep.nn.source import WeightSource
from lockstep.ops import Ops
from lockstep.types import GroupSpec, Layout, RuleError


class Model(Protocol):
    """What runs a model sees of it. A step's plan is built with `groups`, or with `fresh_groups`
    where nothing is kept. `ops` is the table it was built with."""

    @property
    def ops(self) -> Ops: ...
    def __call__(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def embed(self, hidden: Tensor, q_indptr: Sequence[int], how: str | None = None) -> Tensor: ...
    def groups(self, page_size: int = 16, kv_dtype: str = "float32") -> tuple[GroupSpec, ...]: ...
    def fresh_groups(self) -> tuple[GroupSpec, ...]: ...
    @property
    def layer_map(self) -> tuple[GroupLayer, ...]: ...
    @property
    def max_position(self) -> int: ...
    @property
    def generates(self) -> bool: ...


class EncoderDecoder(Model, Protocol):
    """A model whose requests begin with a step of `encoder_groups`, which leaves the keys of its
    cross groups in the cache."""

    def encode(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor: ...
    def encoder_groups(
        self, page_size: int = 16, kv_dtype: str = "float32"
    ) -> tuple[GroupSpec, ...]: ...
    @property
    def encoder_layer_map(self) -> tuple[GroupLayer, ...]: ...


@dataclass(frozen=True)
class BlockSpec:
    """One layer. `sandwich`: the outputs of attention and feed-forward are normed too."""

    attn: DenseSpec | LatentSpec
    mlp: MlpSpec | MoeSpec
    sandwich: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only model."""

    vocab_size: int
    hidden: int
    max_position: int
    blocks: tuple[BlockSpec, ...]
    norm: RMSSpec
    tied: bool
    embed_scale: float = 1.0
    logit_cap: float | None = None

    def with_windows(self, windows: Sequence[int | None]) -> DecoderSpec:
        """The same model with one window per layer."""
        if len(windows) != len(self.blocks):
            got = f"{len(windows)} types, {len(self.blocks)} layers"
            raise RuleError("layer_types names every layer", got, "Check config.json")
        pairs = zip(self.blocks, windows, strict=True)
        return replace(
            self, blocks=tuple(replace(b, attn=replace(b.attn, window=w)) for b, w in pairs)
        )


@dataclass(frozen=True, eq=False)
class Block:
    """x + attention(norm x), then x + feed-forward(norm x). What is to be added last is handed on:
    the next norm adds it. The norms behind are None where the model has none."""

    attn: Dense | Latent
    mlp: Mlp | Moe
    input_norm: RMSNorm
    pre_mlp_norm: RMSNorm
    post_attention_norm: RMSNorm | None
    post_mlp_norm: RMSNorm | None

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, cos_sin: CosSins, step: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_norm.add(hidden, residual)
        hidden = self.attn(hidden, cos_sin, step)
        if self.post_attention_norm:
            hidden = self.post_attention_norm(hidden)
        hidden, residual = self.pre_mlp_norm.add(hidden, residual)
        hidden = self.mlp(hidden)
        if self.post_mlp_norm:
            hidden = self.post_mlp_norm(hidden)
        return hidden, residual


@dataclass(frozen=True, eq=False)
class PostBlock:
    """norm(x + attention), with an encoder to look at another one, then norm(x + feed-forward): the
    blocks of bert and bart."""

    attn: Dense
    attn_norm: LayerNorm
    mlp: Mlp
    mlp_norm: LayerNorm
    cross: Cross | None = None
    cross_norm: LayerNorm | None = None

    def __call__(self, x: Tensor, step: AttentionContext) -> Tensor:
        x = self.attn_norm(x + self.attn(x, {}, step))
        if self.cross and self.cross_norm:
            x = self.cross_norm(x + self.cross(x, step))
        return self.mlp_norm(x + self.mlp(x))


@dataclass(frozen=True, eq=False)
class Decoder:
    """ids [T], positions [T] and a lowered step → hidden [T, d] → logits [T, vocab]."""

    spec: DecoderSpec
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Linear | None
    ops: Ops
    pooling: str = "last"

    def __call__(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        return self.hidden_states(ids, positions, step, ())[0]

    def hidden_states(
        self, ids: Tensor, positions: Tensor, step: AttentionContext, layers: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """What `logits` takes, and the residual stream behind each of `layers`."""
        hidden, residual = self.embedding(ids), None
        cos_sin = {
            rope: self.ops.rope_cos_sin(positions, freqs, rope.factor)
            for rope, freqs in self._freqs.items()
        }
        behind: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            hidden, residual = block(hidden, residual, cos_sin, step)
            if i in layers:
                behind[i] = hidden + residual
        return self.norm.add(hidden, residual)[0], *(behind[i] for i in layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, d] → float32 [S, vocab]."""
        if self.head is None:
            rule = "a model that generates has a head"
            raise RuleError(rule, "weights without lm_head", "Use it for embeddings")
        logits = self.head(hidden).float()
        cap = self.spec.logit_cap
        return logits if cap is None else self.ops.soft_cap(logits, cap)

    def embed(self, hidden: Tensor, q_indptr: Sequence[int], how: str | None = None) -> Tensor:
        """Embeddings of whole requests, [B, d] float32 of length 1; `how` is "last" or "mean"."""
        return pool(self.ops, hidden, q_indptr, how or self.pooling)

    def groups(self, page_size: int = 16, kv_dtype: str = "float32") -> tuple[GroupSpec, ...]:
        """The KV groups of a generating step."""
        return cached(self._merged[0], page_size, kv_dtype)

    def fresh_groups(self) -> tuple[GroupSpec, ...]:
        """The groups of an embedding step, which keeps nothing; the layer map is the same."""
        return tuple(replace(g, layout=Layout.FRESH) for g in self._merged[0])

    @property
    def layer_map(self) -> tuple[GroupLayer, ...]:
        """Attention layer → (group, layer in it)."""
        return self._merged[1]

    @property
    def max_position(self) -> int:
        """Positions are below this."""
        return self.spec.max_position

    @property
    def generates(self) -> bool:
        return self.head is not None

    @cached_property
    def _freqs(self) -> dict[Rope, Tensor]:
        ropes = {b.attn.rope for b in self.spec.blocks if b.attn.rope}
        return {rope: rope.freqs(self.ops.device) for rope in ropes}

    @cached_property
    def _merged(self) -> tuple[tuple[GroupSpec, ...], tuple[GroupLayer, ...]]:
        return groups_of([b.attn for b in self.blocks])


def groups_of(layers: Sequence[Attention]) -> tuple[tuple[GroupSpec, ...], tuple[GroupLayer, ...]]:
    """The groups of a step's attention layers, and the place of each."""
    return merge([layer.group() for layer in layers])


def cached(groups: Sequence[GroupSpec], page_size: int, kv_dtype: str) -> tuple[GroupSpec, ...]:
    """Groups with the cache's page size and dtype; a fresh group stores nothing and has neither."""
    return tuple(
        g if g.layout is Layout.FRESH else replace(g, page_size=page_size, kv_dtype=kv_dtype)
        for g in groups
    )


def build(spec: DecoderSpec, weights: WeightSource) -> Decoder:
    """The model of a spec. A checkpoint of the trunk alone has no "model." before its names, and,
    untied, no head."""
    w = weights if weights.has("embed_tokens.weight") else weights.at("model")
    w.skip(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    table = w.rows("embed_tokens.weight", spec.vocab_size, spec.hidden)
    blocks = tuple(_block(b, w.at("layers", i), i, spec.norm) for i, b in enumerate(spec.blocks))
    norm = spec.norm.build(w, "norm", spec.hidden)
    if spec.tied:
        weights.skip(r"lm_head\.weight")
        head: Linear | None = Linear(w.pack(table), w.ops)
    elif w is weights and not weights.has("lm_head.weight"):
        head = None
    else:
        head = weights.linear("lm_head", spec.vocab_size, spec.hidden)
    return Decoder(
        spec=spec,
        embedding=Embedding(table, spec.embed_scale),
        blocks=blocks,
        norm=norm,
        head=head,
        ops=w.ops,
    )


def _block(spec: BlockSpec, w: WeightSource, index: int, norm: RMSSpec) -> Block:
    def build(name: str) -> RMSNorm:
        return norm.build(w, name, spec.attn.hidden)

    sandwich = spec.sandwich
    before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    return Block(
        input_norm=build("input_layernorm"),
        pre_mlp_norm=build(before_mlp),
        post_attention_norm=build("post_attention_layernorm") if sandwich else None,
        post_mlp_norm=build("post_feedforward_layernorm") if sandwich else None,
        attn=spec.attn.build(w.at("self_attn"), index),
        mlp=spec.mlp.build(w.at("mlp")),
    )
