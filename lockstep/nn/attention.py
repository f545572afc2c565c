"""Attention layers, projections around `step.attend`: dense, latent (MLA, absorbed: prefill and
decode are the same attention over one shared row per token), and cross (an encode step stores the
keys). A layer knows its index and its `GroupSpec`, no requests and no pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lockstep.nn.layers import Linear, RMSNorm, RMSSpec, WeightSource, stack
from lockstep.nn.rope import Rope
from lockstep.ops import CosSin, Heads, Ops, Packed
from lockstep.types import AttnSpec, GroupSpec, Layout

CosSins = dict[Rope, CosSin]
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT_NORM = RMSSpec(1e-6)  # independent of the eps of the model's other norms


class AttentionContext(Protocol):
    """What a layer sees of a lowered step; `run.step.Step` is one."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor: ...
    def store(self, layer: int, k: Tensor, v: Tensor) -> None: ...


class GroupLayer(NamedTuple):
    """The KV group of an attention layer, and the layer's index in that group."""

    group: int
    layer: int


@dataclass(frozen=True)
class DenseSpec:
    """Attention over keys and values per head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    window: int | None = None  # keys a row sees, itself included
    soft_cap: float | None = None
    qk_norm: RMSSpec | None = None  # only with a rope
    bias: bool = False
    out_bias: bool = False
    sinks: bool = False

    @staticmethod
    def plain(hidden: int, heads: int) -> "DenseSpec":
        """Returns heads that divide `hidden` among them, with biases and without rope."""
        d = hidden // heads
        return DenseSpec(hidden, heads, heads, d, 1 / math.sqrt(d), bias=True, out_bias=True)

    def build(
        self, w: WeightSource, index: int, names: Sequence[str] = NAMES, width: int | None = None
    ) -> "Dense":
        """Builds layer `index`. Its input has `width` columns, `hidden` by default."""
        d, norm = self.head_dim, self.qk_norm
        widths = (self.heads * d, self.kv_heads * d, self.kv_heads * d)
        qkv = w.fused(dict(zip(names, widths)), width or self.hidden, self.bias)
        out = w.linear(names[3], self.hidden, self.heads * d, self.out_bias)
        qk_norm = stack([norm.weight(w, n, d) for n in ("q_norm", "k_norm")]) if norm else None
        sinks = w.tensor("sinks", self.heads) if self.sinks else None
        return Dense(index, self, qkv=qkv, out=out, ops=w.ops, qk_norm=qk_norm, sinks=sinks)

    def group(self, layout: Layout, sinks: tuple[float, ...] | None = None) -> GroupSpec:
        """Returns the group of one such layer; `sinks`: a logit per query head."""
        return GroupSpec(
            layout=layout,
            heads=self.heads,
            kv_heads=self.kv_heads,
            d_qk=self.head_dim,
            d_v=self.head_dim,
            layers=(AttnSpec(self.scale, self.soft_cap, sinks),),
            window=self.window,
            causal=layout is Layout.DENSE,
        )


@dataclass(frozen=True, eq=False)
class Dense:
    """x [T, hidden] → [T, hidden]. `qk_norm` [2, head_dim]: weights of the norms of q and of k."""

    index: int
    spec: DenseSpec
    qkv: Linear
    out: Linear
    ops: Ops
    qk_norm: Tensor | None = None
    sinks: Tensor | None = None
    layout: Layout = Layout.DENSE

    def __call__(self, x: Tensor, cos_sin: CosSins, step: AttentionContext) -> Tensor:
        return self.out(step.attend(self.index, *self._project(x, cos_sin)))

    def store(self, x: Tensor, cos_sin: CosSins, step: AttentionContext) -> None:
        """Stores the keys and values of rows whose attention is not needed."""
        _, k, v = self._project(x, cos_sin)
        step.store(self.index, k, v)

    def _project(self, x: Tensor, cos_sin: CosSins) -> Sequence[Tensor]:
        s, qkv = self.spec, self.qkv(x)
        if s.rope is None:
            counts = [s.heads, s.kv_heads, s.kv_heads]
            return qkv.view(len(x), sum(counts), s.head_dim).split_with_sizes(counts, 1)
        return self.ops.qk_norm_rope(qkv, self._heads, self.qk_norm, cos_sin[s.rope])

    @cached_property
    def _heads(self) -> Heads:
        s = self.spec
        eps = s.qk_norm.eps if s.qk_norm else 0.0
        interleaved = s.rope is not None and s.rope.interleaved
        return Heads(s.heads, s.kv_heads, s.head_dim, eps=eps, interleaved=interleaved)

    def group(self) -> GroupSpec:
        sinks = None if self.sinks is None else tuple(self.sinks.tolist())
        return self.spec.group(self.layout, sinks)


@dataclass(frozen=True, eq=False)
class Cross:
    """Attention of a decoder's rows to an encoder's, which the encode step passes to `store`."""

    index: int
    spec: DenseSpec
    q: Linear
    kv: Linear
    out: Linear

    def store(self, x: Tensor, layer: int, step: AttentionContext) -> None:
        """Stores keys and values of x [T, hidden], the encoder's output; `layer` of that step."""
        k, v = self.kv(x).view(len(x), 2 * self.spec.kv_heads, self.spec.head_dim).chunk(2, 1)
        step.store(layer, k, v)

    def __call__(self, x: Tensor, step: AttentionContext) -> Tensor:
        q = self.q(x).view(len(x), self.spec.heads, self.spec.head_dim)
        return self.out(step.attend(self.index, q, None, None))

    def group(self) -> GroupSpec:
        return self.spec.group(Layout.CROSS)


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: per token a latent (`rank`) and one rotated key (`d_rope`)."""

    hidden: int
    heads: int
    rank: int
    d_nope: int
    d_rope: int
    d_v: int
    scale: float
    rope: Rope
    q_rank: int | None = None
    bias: bool = False
    window: int | None = None
    norm: RMSSpec = LATENT_NORM

    def build(self, w: WeightSource, index: int) -> "Latent":
        d_q = self.heads * (self.d_nope + self.d_rope)
        if self.q_rank is None:
            queries: tuple[Linear | RMSNorm, ...] = (w.linear("q_proj", d_q, self.hidden),)
        else:
            low = w.linear("q_a_proj", self.q_rank, self.hidden, self.bias)
            norm = self.norm.build(w, "q_a_layernorm", self.q_rank)
            queries = (low, norm, w.linear("q_b_proj", d_q, self.q_rank))
        kv = w.tensor("kv_b_proj.weight", self.heads * (self.d_nope + self.d_v), self.rank)
        per_head = kv.view(self.heads, self.d_nope + self.d_v, self.rank)
        compress = w.linear("kv_a_proj_with_mqa", self.rank + self.d_rope, self.hidden, self.bias)
        return Latent(
            index=index,
            spec=self,
            queries=queries,
            compress=compress,
            norm=self.norm.build(w, "kv_a_layernorm", self.rank),
            absorb=w.pack(per_head[:, : self.d_nope].transpose(1, 2)),
            expand=w.pack(per_head[:, self.d_nope :]),
            out=w.linear("o_proj", self.hidden, self.heads * self.d_v, self.bias),
            ops=w.ops,
        )


@dataclass(frozen=True, eq=False)
class Latent:
    """x [T, hidden] → [T, hidden]. `absorb`, `expand`: per head, into and out of latent space."""

    index: int
    spec: LatentSpec
    queries: tuple[Linear | RMSNorm, ...]  # one projection, or two with a low rank and its norm
    compress: Linear
    norm: RMSNorm
    absorb: Packed
    expand: Packed
    out: Linear
    ops: Ops

    def __call__(self, x: Tensor, cos_sin: CosSins, step: AttentionContext) -> Tensor:
        s, ops, rotation = self.spec, self.ops, cos_sin[self.spec.rope]
        q = x
        for layer in self.queries:
            q = layer(q)
        q = q.view(len(x), s.heads, s.d_nope + s.d_rope)
        absorbed = ops.batched_linear(q[..., : s.d_nope], self.absorb)
        rotated = ops.rope(q[..., s.d_nope :], rotation, s.rope.interleaved)
        latent, shared = self.compress(x).split_with_sizes([s.rank, s.d_rope], -1)
        key = ops.rope(shared[:, None], rotation, s.rope.interleaved)
        queries = torch.cat((absorbed, rotated), -1)
        keys = torch.cat((self.norm(latent)[:, None], key), -1)
        seen = step.attend(self.index, queries, keys, keys[..., : s.rank])
        return self.out(ops.batched_linear(seen, self.expand))

    def group(self) -> GroupSpec:
        s = self.spec
        return GroupSpec(
            layout=Layout.LATENT,
            heads=s.heads,
            kv_heads=1,
            d_qk=s.rank + s.d_rope,
            d_v=s.rank,
            layers=(AttnSpec(s.scale),),
            window=s.window,
        )


Attention = Dense | Latent | Cross
Grouped = tuple[tuple[GroupSpec, ...], tuple[GroupLayer, ...]]


def groups_of(
    layers: Sequence[Attention], page_size: int = 16, kv_dtype: str = "float32"
) -> Grouped:
    """Groups layers that store and see their keys alike, in order of their first layer. Returns the
    groups, with the cache's page size and dtype unless they are fresh, and the layer map."""
    members: dict[GroupSpec, list[AttnSpec]] = {}
    layer_map = []
    for spec in (layer.group() for layer in layers):
        if spec.layout is not Layout.FRESH:
            spec = replace(spec, page_size=page_size, kv_dtype=kv_dtype)
        group = replace(spec, layers=(AttnSpec(1.0),))
        attns = members.setdefault(group, [])
        layer_map.append(GroupLayer(list(members).index(group), len(attns)))
        attns += spec.layers
    groups = [replace(group, layers=tuple(attns)) for group, attns in members.items()]
    return tuple(groups), tuple(layer_map)
