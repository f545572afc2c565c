"""What a model is, and the decoder. A model file makes a `DecoderSpec` from a config (a variant is
a `replace` of it); the spec builds a `Decoder`, which has the weights and computes rows. Encoders
and encoder-decoders are made of `PostBlock`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.nn import attention
from lockstep.nn.attention import AttentionContext, CosSins, Cross, Dense, Latent
from lockstep.nn.layers import Embedding, LayerNorm, Linear, RMSNorm, RMSSpec, WeightSource, pool
from lockstep.nn.mlp import Mlp, MlpSpec, Moe, MoeSpec
from lockstep.nn.rope import Rope
from lockstep.ops import Ops
from lockstep.types import GroupSpec, RuleError

# the norms of a block: field and name in the files
NORMS = {"input_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"}
SANDWICH_NORMS = NORMS | {
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, eq=False)
class Model(ABC):
    """The interface of a model: ids [T], positions [T] and a lowered step → hidden [T, d] → logits,
    if it has a head, or embeddings. A generating step's plan is built with `groups`."""

    ops: Ops
    head: Linear | None
    max_position: int  # positions are below this

    pooling: ClassVar[str] = "last"
    position_table: ClassVar[bool] = False  # positions have learned embeddings, pads' too
    encodes: ClassVar[bool] = False  # an encoder-decoder: a request begins with an encode step

    @abstractmethod
    def __call__(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor: ...

    @property
    @abstractmethod
    def attentions(self) -> Sequence[attention.Attention]:
        """The attention layers of a generating step, ordered by index."""

    @property
    def generates(self) -> bool:
        return self.head is not None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, d] → activations [S, vocab]; float32 if a soft cap or a bias is applied."""
        if self.head is None:
            rule = "a model that generates has a head"
            raise RuleError(rule, "weights without lm_head", "Use it for embeddings")
        return self.head(hidden)

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.ops.dtype

    def embed(self, hidden: Tensor, q_indptr: Sequence[int], how: str | None = None) -> Tensor:
        """Embeddings of whole requests, float32 [B, d], of norm 1; `how`: see `layers.pool`."""
        return pool(self.ops, hidden, q_indptr, how or self.pooling)

    def groups(self, page_size: int = 16, kv_dtype: str = "float32") -> tuple[GroupSpec, ...]:
        """Returns the KV groups of a generating step."""
        return attention.groups_of(self.attentions, page_size, kv_dtype)[0]

    @property
    def layer_map(self) -> tuple[attention.GroupLayer, ...]:
        """Attention layer → (group, layer in it)."""
        return attention.groups_of(self.attentions)[1]

    def cos_sin(self, positions: Tensor) -> CosSins:
        """Returns cos and sin of a step's positions, for every rope of the model."""
        angles = self.ops.rope_cos_sin
        return {rope: angles(positions, freqs, rope.factor) for rope, freqs in self._freqs.items()}

    @cached_property
    def _freqs(self) -> dict[Rope, Tensor]:
        ropes = {layer.spec.rope for layer in self.attentions}
        tensor = partial(torch.tensor, dtype=torch.float32, device=self.ops.device)
        return {rope: tensor(rope.inv_freq) for rope in ropes if rope}


@dataclass(frozen=True)
class BlockSpec:
    """One layer. `sandwich`: the outputs of attention and feed-forward are normalized too."""

    attn: attention.DenseSpec | attention.LatentSpec
    mlp: MlpSpec | MoeSpec
    sandwich: bool = False

    def build(self, w: WeightSource, index: int, norm: RMSSpec) -> "Block":
        names = SANDWICH_NORMS if self.sandwich else NORMS
        norms = {field: norm.build(w, name, self.attn.hidden) for field, name in names.items()}
        attn = self.attn.build(w.at("self_attn"), index)
        return Block(attn, self.mlp.build(w.at("mlp")), **norms)


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
    unused: tuple[str, ...] = ()  # patterns of other tensors that the files may hold

    def build(self, weights: WeightSource) -> "Decoder":
        """Builds the model. A trunk's checkpoint has no "model." in names and, untied, no head."""
        w = weights if weights.has("embed_tokens.weight") else weights.at("model")
        w.skip(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
        for pattern in self.unused:
            weights.skip(pattern)
        table = w.rows("embed_tokens.weight", self.vocab_size, self.hidden)
        blocks = [b.build(w.at("layers", i), i, self.norm) for i, b in enumerate(self.blocks)]
        head: Linear | None = None
        if self.tied:
            weights.skip(r"lm_head\.weight")
            head = Linear(w.pack(table), w.ops)
        elif w is not weights or weights.has("lm_head.weight"):
            head = weights.linear("lm_head", self.vocab_size, self.hidden)
        return Decoder(
            ops=w.ops,
            head=head,
            max_position=self.max_position,
            spec=self,
            embedding=Embedding(table, w.ops, self.embed_scale),
            blocks=tuple(blocks),
            norm=self.norm.build(w, "norm", self.hidden),
        )


@dataclass(frozen=True, eq=False)
class Block:
    """x + attention(norm x), then x + feed-forward(norm x). The decoder applies `input_norm` before
    the block, and with it adds the previous block's output to the residual."""

    attn: Dense | Latent
    mlp: Mlp | Moe
    input_norm: RMSNorm
    pre_mlp_norm: RMSNorm
    post_attention_norm: RMSNorm | None = None  # this and the next: of `sandwich` blocks
    post_mlp_norm: RMSNorm | None = None

    def __call__(
        self, hidden: Tensor, residual: Tensor, cos_sin: CosSins, step: AttentionContext
    ) -> tuple[Tensor, Tensor]:
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
    """A bert or bart block: norm(x + attention), norm(x + cross), norm(x + feed-forward)."""

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
class PostStack:
    """Adds learned positions to rows, normalizes, then applies the blocks."""

    positions: Embedding
    norm: LayerNorm
    blocks: tuple[PostBlock, ...]

    def __call__(self, x: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        x = self.norm(x + self.positions(positions))
        for block in self.blocks:
            x = block(x, step)
        return x


@dataclass(frozen=True, eq=False)
class Decoder(Model):
    """A decoder-only model, built by a `DecoderSpec`."""

    spec: DecoderSpec
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: RMSNorm

    def __call__(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        return self.hidden_states(ids, positions, step, ())[0]

    def hidden_states(
        self, ids: Tensor, positions: Tensor, step: AttentionContext, layers: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Returns the input of `logits`, and for each of `layers` the residual after that layer."""
        cos_sin, residual = self.cos_sin(positions), self.embedding(ids)
        hidden = self.blocks[0].input_norm(residual)
        norms = [*(block.input_norm for block in self.blocks[1:]), self.norm]
        behind: dict[int, Tensor] = {}
        for i, (block, norm) in enumerate(zip(self.blocks, norms, strict=True)):
            hidden, residual = norm.add(*block(hidden, residual, cos_sin, step))
            if i in layers:
                behind[i] = residual
        return hidden, *(behind[i] for i in layers)

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().logits(hidden), self.spec.logit_cap
        return logits if cap is None else self.ops.soft_cap(logits.float(), cap)

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.ops.dtype if self.spec.logit_cap is None else torch.float32

    @property
    def attentions(self) -> Sequence[attention.Attention]:
        return [block.attn for block in self.blocks]
