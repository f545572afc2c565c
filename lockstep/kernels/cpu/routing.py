"""Mixture of experts on the CPU: chooses the experts of every row and combines their outputs.

Softmax, sigmoid and shares are row kernels; the rest moves, compares or rounds once, which torch
does with the same bits everywhere. Rows are stored expert by expert. Called through ops.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.cpu import rows
from lockstep.ops import Routing


class Routes(NamedTuple):
    """The experts of every row, and the pairs (row, choice) in their order in memory."""

    ids: Tensor  # int64 [t, k]
    weights: Tensor  # float32 [t, k]
    pairs: Tensor  # int64 [t · k]: numbers row · k + choice, by expert, then ascending
    indptr: Tensor  # int64 [experts + 1]: where each expert's pairs begin


def route(logits: Tensor, routing: Routing, correction: Tensor | None) -> Routes:
    """Scores experts; returns the best k per row, their weights, and the pairs by expert."""
    scores = logits
    if routing.score != "chosen":
        scores = rows.softmax(logits) if routing.score == "softmax" else rows.sigmoid(logits)
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        ranked = limited(ranked, routing, in_pairs=correction is not None)
    ids = best(ranked, routing.k)
    weights = scores.gather(1, ids)
    if routing.score == "chosen":
        weights = rows.softmax(weights)
    if routing.norm:
        weights = rows.shares(weights, routing.floor)
    if routing.scale != 1.0:
        weights = weights * routing.scale
    experts, pairs = ids.flatten().sort(stable=True)
    indptr = torch.searchsorted(experts, torch.arange(routing.experts + 1))
    return Routes(ids=ids, weights=weights, pairs=pairs, indptr=indptr)


def limited(ranked: Tensor, routing: Routing, in_pairs: bool) -> Tensor:
    """Sets experts outside of the best groups (by best expert, or by best two's sum) to -inf."""
    grouped = ranked.view(len(ranked), routing.groups, -1)
    ordered = grouped.sort(-1, descending=True).values
    top = ordered[..., 0]
    if in_pairs and ordered.shape[-1] > 1:
        top = top + ordered[..., 1]
    taken = torch.zeros_like(top, dtype=torch.bool).scatter(1, best(top, routing.keep), True)
    return grouped.masked_fill(~taken[..., None], -torch.inf).view_as(ranked)


def best(scores: Tensor, k: int) -> Tensor:
    """Returns ids of the k largest per row, largest first, of equals the smaller id first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :k]


def dispatch(x: Tensor, routes: Routes) -> Tensor:
    """Returns one row of x per pair, by expert."""
    return x.index_select(0, routes.pairs // routes.weights.shape[1])


def combine(parts: Tensor, routes: Routes) -> Tensor:
    """Adds the parts of every row times their weights, in the order of its choices."""
    by_row = torch.empty_like(parts).index_copy_(0, routes.pairs, parts)
    slots = by_row.view(*routes.weights.shape, -1)
    total = torch.zeros_like(slots[:, 0])
    for nth in range(slots.shape[1]):
        total = total + slots[:, nth] * routes.weights[:, nth, None]
    return total
