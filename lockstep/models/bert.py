"""Bert: an encoder. Every row sees all rows of its request, nothing is kept, and the result is an
embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from lockstep.nn.attention import AttentionContext, Dense, DenseSpec, GroupLayer
from lockstep.nn.decoder import PostBlock, groups_of
from lockstep.nn.embed import Embedding, pool
from lockstep.nn.mlp import Elementwise, Mlp, activation
from lockstep.nn.norm import LayerNorm, layer_norm
from lockstep.nn.source import WeightSource
from lockstep.ops import Ops
from lockstep.types import GroupSpec, Layout, RuleError


@dataclass(frozen=True, eq=False)
class Bert:
    """ids [T], positions [T] and a lowered step of fresh groups → hidden [T, d] → embeddings."""

    words: Embedding
    kind: Tensor  # [d] the first segment's embedding: a request is one segment
    spots: Embedding
    norm: LayerNorm
    blocks: tuple[PostBlock, ...]
    ops: Ops

    def __call__(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        x = self.norm(self.words(ids) + self.kind + self.spots(positions))
        for block in self.blocks:
            x = block(x, step)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        raise RuleError("a model that generates is a decoder", "bert", "Use it for embeddings")

    def embed(self, hidden: Tensor, q_indptr: Sequence[int], how: str | None = None) -> Tensor:
        """Embeddings of whole requests, [B, d] float32 of length 1; `how` is "mean", "last" or
        "first"."""
        return pool(self.ops, hidden, q_indptr, how or "mean")

    def groups(self, page_size: int = 16, kv_dtype: str = "float32") -> tuple[GroupSpec, ...]:
        """Nothing is kept, so page size and dtype do not matter."""
        return self._merged[0]

    def fresh_groups(self) -> tuple[GroupSpec, ...]:
        return self._merged[0]

    @property
    def layer_map(self) -> tuple[GroupLayer, ...]:
        return self._merged[1]

    @property
    def max_position(self) -> int:
        """Positions are below this."""
        return len(self.spots.weight)

    @property
    def generates(self) -> bool:
        return False

    @cached_property
    def _merged(self) -> tuple[tuple[GroupSpec, ...], tuple[GroupLayer, ...]]:
        return groups_of([b.attn for b in self.blocks])


def build(config: Any, weights: WeightSource) -> Bert:
    if config.is_decoder or config.add_cross_attention:
        rule = "bert is an encoder"
        raise RuleError(rule, "is_decoder or add_cross_attention", "Use an encoder checkpoint")
    w = weights if weights.has("embeddings.word_embeddings.weight") else weights.at("bert")
    weights.skip(r"cls\..*")
    w.skip(r"(pooler\..*|embeddings\.position_ids)")
    table, d = w.at("embeddings"), config.hidden_size
    return Bert(
        words=Embedding(table.rows("word_embeddings.weight", config.vocab_size, d)),
        kind=table.rows("token_type_embeddings.weight", config.type_vocab_size, d)[0],
        spots=Embedding(
            table.rows("position_embeddings.weight", config.max_position_embeddings, d)
        ),
        norm=norm(table, "LayerNorm", config),
        blocks=tuple(
            block(config, w.at("encoder", "layer", i), i) for i in range(config.num_hidden_layers)
        ),
        ops=w.ops,
    )


def block(config: Any, w: WeightSource, index: int) -> PostBlock:
    d, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    spec = DenseSpec(
        d, config.num_attention_heads, config.num_attention_heads, head, 1 / math.sqrt(head)
    )
    qkv = w.at("attention", "self").fused(("query", "key", "value"), (d, d, d), d, bias=True)
    attn = Dense(
        index,
        spec,
        qkv,
        w.linear("attention.output.dense", d, d, True),
        w.ops,
        layout=Layout.FRESH,
        causal=False,
    )
    up, down = (
        w.linear("intermediate.dense", config.intermediate_size, d, True),
        w.linear("output.dense", d, config.intermediate_size, True),
    )
    mlp = Mlp(up, down, Elementwise(activation(config.hidden_act)), w.ops)
    return PostBlock(
        attn,
        norm(w, "attention.output.LayerNorm", config),
        mlp,
        norm(w, "output.LayerNorm", config),
    )


def norm(w: WeightSource, name: str, config: Any) -> LayerNorm:
    """Old files call a norm's weight and bias gamma and beta."""
    if w.has(f"{name}.gamma"):
        gamma, beta = (w.tensor(f"{name}.{part}", config.hidden_size) for part in ("gamma", "beta"))
        return LayerNorm(gamma, beta, config.layer_norm_eps, w.ops)
    return layer_norm(w, name, config.hidden_size, config.layer_norm_eps)
