"""Bert: an encoder for embeddings. Rows see all rows of their request; nothing is cached."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from lockstep.models import Config, Spec
from lockstep.nn.attention import AttentionContext, Dense, DenseSpec
from lockstep.nn.decoder import Model, PostBlock, PostStack
from lockstep.nn.layers import Embedding, WeightSource, layer_norm
from lockstep.nn.mlp import MlpSpec
from lockstep.types import Layout, RuleError

NAMES = ("self.query", "self.key", "self.value", "output.dense")


@dataclass(frozen=True, eq=False)
class Bert(Model):
    """A step's groups are fresh, so its page size and dtype do not matter."""

    words: Embedding  # with the first segment's embedding added: a request is one segment
    encoder: PostStack

    pooling: ClassVar[str] = "mean"
    position_table: ClassVar[bool] = True

    def __call__(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        return self.encoder(self.words(ids), positions, step)

    @property
    def attentions(self) -> Sequence[Dense]:
        return [block.attn for block in self.encoder.blocks]


def describe(config: Config) -> Spec:
    if config.is_decoder or config.add_cross_attention:
        got = "is_decoder or add_cross_attention"
        raise RuleError("bert is an encoder", got, "Use an encoder checkpoint")
    return Spec(partial(build, config))


def build(config: Config, weights: WeightSource) -> Bert:
    d, eps = config.hidden_size, config.layer_norm_eps
    w = weights if weights.has("embeddings.word_embeddings.weight") else weights.at("bert")
    weights.skip(r"cls\..*")
    w.skip(r"(pooler\..*|embeddings\.position_ids)")
    table, layers = w.at("embeddings"), w.at("encoder", "layer")
    words = table.rows("word_embeddings.weight", config.vocab_size, d)
    segment = table.rows("token_type_embeddings.weight", config.type_vocab_size, d)[0]
    length = config.max_position_embeddings
    positions = Embedding(table.rows("position_embeddings.weight", length, d), w.ops)
    blocks = tuple(block(config, layers.at(i), i) for i in range(config.num_hidden_layers))
    return Bert(
        ops=w.ops,
        head=None,
        max_position=length,
        words=Embedding(words + segment, w.ops),
        encoder=PostStack(positions, layer_norm(table.at("LayerNorm"), d, eps), blocks),
    )


def block(config: Config, w: WeightSource, index: int) -> PostBlock:
    d, eps = config.hidden_size, config.layer_norm_eps
    attention = DenseSpec.plain(d, config.num_attention_heads)
    attn = replace(attention.build(w.at("attention"), index, NAMES), layout=Layout.FRESH)
    spec = MlpSpec(d, config.intermediate_size, config.hidden_act, bias=True)
    mlp = spec.ungated(w, "intermediate.dense", "output.dense")
    attn_norm = layer_norm(w.at("attention.output.LayerNorm"), d, eps)
    return PostBlock(attn, attn_norm, mlp, layer_norm(w.at("output.LayerNorm"), d, eps))
