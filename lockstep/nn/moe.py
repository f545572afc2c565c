"""Mixture of experts: a row's result depends on its own experts, in its own slot order, and on no
other row.

The router works in float32; equal scores go to the smaller expert id. An expert multiplies whatever
rows it got under the GEMM that does not mind how many they are; the results are added slot by slot.
No atomics, no sorting of rows that would change a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.kernels.cpu import rows
from lockstep.nn.linear import Linear
from lockstep.nn.mlp import Mlp, MlpSpec, sigmoid
from lockstep.nn.norm import on_cpu
from lockstep.nn.source import Weights
from lockstep.types import RuleError

Experts = Callable[[Weights], tuple[Mlp, ...]]


def softmax(x: Tensor) -> Tensor:
    """Over each row of [T, n]."""
    return rows.softmax(x) if on_cpu(x) else F.softmax(x, -1)


def shares(x: Tensor, floor: float) -> Tensor:
    """Each row of [T, n] divided by its sum plus `floor`."""
    return rows.shares(x, floor) if on_cpu(x) else x / (x.sum(-1, keepdim=True) + floor)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "chosen": lambda x: x,
}


@dataclass(frozen=True)
class Routing:
    """From router logits [T, experts] to expert ids and weights [T, k].

    score       "softmax" over all experts, "sigmoid" of each, or "chosen": logits rank, a softmax over the k chosen weighs
    norm        weights are divided by their sum (plus `floor`)
    scale       multiplies the weights at last
    groups, keep    experts lie in `groups` equal groups of which the best `keep` take part; 1 of 1 = all
    """

    k: int
    experts: int
    score: str = "softmax"
    norm: bool = False
    floor: float = 0.0
    scale: float = 1.0
    groups: int = 1
    keep: int = 1

    def __post_init__(self) -> None:
        counts = (self.k, self.experts, self.groups, self.keep)
        if (
            min(counts) < 1
            or self.keep > self.groups
            or self.experts % self.groups
            or self.k > self.experts // self.groups * self.keep
        ):
            got = f"k={self.k} of {self.experts} experts, {self.keep} of {self.groups} groups"
            raise RuleError(
                "a router picks some of its experts, from some of their equal groups",
                got,
                "Check config.json",
            )

    def __call__(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """`bias` corrects what is chosen, not what it weighs."""
        scores = SCORES[self.score](logits)
        ranked = scores if bias is None else scores + bias
        if self.groups > 1:
            ranked = self._limit(ranked, pairs=bias is not None)
        ids = best(ranked, self.k)
        weights = scores.gather(1, ids)
        if self.score == "chosen":
            weights = softmax(weights)
        if self.norm:
            weights = shares(weights, self.floor)
        return ids, weights if self.scale == 1.0 else weights * self.scale

    def _limit(self, ranked: Tensor, pairs: bool) -> Tensor:
        """-inf for experts outside of the best groups; a group counts by its best expert, or by the
        sum of its best two."""
        grouped = ranked.view(len(ranked), self.groups, -1)
        ordered = grouped.sort(-1, descending=True).values
        top = (
            ordered[..., 0] + ordered[..., 1]
            if pairs and ordered.shape[-1] > 1
            else ordered[..., 0]
        )
        taken = torch.zeros_like(top, dtype=torch.bool).scatter(1, best(top, self.keep), True)
        return grouped.masked_fill(~taken[..., None], -torch.inf).view_as(ranked)


def best(scores: Tensor, k: int) -> Tensor:
    """Ids of the k largest of every row, largest first, ties by the smaller id."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :k]


@dataclass(frozen=True, eq=False)
class Moe:
    """Routed experts, and one that every row passes through, if the model has it."""

    router: Linear
    correction: Tensor | None
    routing: Routing
    experts: tuple[Mlp, ...]
    shared: Mlp | None

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = self.routing(self.router(x.float()), self.correction)
        parts = x.new_zeros(*ids.shape, x.shape[1])
        for expert in sorted(set(ids.flatten().tolist())):
            row, slot = torch.where(ids == expert)
            parts[row, slot] = self.experts[expert](x[row])
        out = torch.zeros_like(x, dtype=torch.float32)
        for nth in range(self.routing.k):
            out = out + parts[:, nth] * weights[:, nth, None]
        out = out.to(x.dtype)
        return out if self.shared is None else out + self.shared(x)


@dataclass(frozen=True)
class MoeSpec:
    """Which experts, how they are chosen, and where the router lies. `shared`: the size of the
    expert that all rows pass through."""

    routing: Routing
    expert: MlpSpec
    router: str = "gate"
    router_bias: bool = False
    correction: bool = False
    shared: MlpSpec | None = None
    load: Experts | None = None  # how a model keeps its experts, if not one by one

    def build(self, w: Weights) -> Moe:
        n, hidden = self.routing.experts, self.expert.hidden
        weight, bias = w.affine(self.router, n, hidden, self.router_bias)
        correction = (
            w.tensor(f"{self.router}.e_score_correction_bias", n).float()
            if self.correction
            else None
        )
        experts = (
            self.load(w)
            if self.load
            else tuple(self.expert.build(w.at("experts", e)) for e in range(n))
        )
        shared = self.shared.build(w.at("shared_experts")) if self.shared else None
        router = w.pack(weight.float(), bias.float() if bias is not None else None)
        return Moe(router, correction, self.routing, experts, shared)
