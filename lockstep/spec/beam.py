"""Which tokens a tree of guesses has: level by level the best, and of all the best.

A token's score is its log-probability under the draft, summed along its path: the best of all nodes
are a tree. Knows numbers; `model_draft` runs the rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.sample.formulas import counter
from lockstep.sample.sampler import RowBatch, apply_penalties, noise_of
from lockstep.sched.request import DraftTree

LIKELY = 64  # tokens of a row that are looked at


class Candidate(NamedTuple):
    """The guesses up to a token, which stands behind another candidate."""

    path: tuple[int, ...]
    parent: int
    score: float


class Beam:
    """The tree of one request in the making: its candidates, of which the first is the request's
    last token; the `level`, whose children come next, and which of the level before stand `above`
    its own."""

    def __init__(self, top_k: int) -> None:
        self.top_k, self.candidates = top_k, [Candidate((), 0, 0.0)]
        self.level, self.above = [0], [0]
        self._rows = [0]  # candidates that are computed, in order

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """The guesses up to every node of the level."""
        return [self.candidates[i].path for i in self.level]

    @property
    def parents(self) -> tuple[int, ...]:
        """Of all nodes so far, those of the level last."""
        above = [self.candidates[i].parent for i in self._rows[1:]]
        return tuple([self._rows.index(parent) - 1 for parent in above])

    def grow(self, scores: Sequence[Sequence[float]], ids: Sequence[Sequence[int]]) -> None:
        """Children of every node of the level; the best of them are the next one."""
        first, every = len(self.candidates), self.candidates
        for node, own_scores, own_ids in zip(self.level, scores, ids, strict=True):
            path, _, base = every[node]
            every += [
                Candidate((*path, token), node, base + score)
                for token, score in zip(own_ids, own_scores, strict=True)
                if score > float("-inf")
            ]
        level = self._best(range(first, len(every)), self.top_k)
        self.above = [self.level.index(every[i].parent) for i in level]
        self.level = level
        self._rows += level

    def tree(self, nodes: int) -> DraftTree:
        """The best `nodes` of all."""
        kept = [0, *self._best(range(1, len(self.candidates)), nodes)]
        chosen = [self.candidates[i] for i in kept[1:]]
        parents = [kept.index(each.parent) for each in chosen]
        return DraftTree(tuple([each.path[-1] for each in chosen]), tuple(parents))

    def _best(self, some: Sequence[int], count: int) -> list[int]:
        """The best of some candidates, in their order."""
        return sorted(sorted(some, key=lambda i: -self.candidates[i].score)[:count])


def best(
    logits: Tensor, batch: RowBatch, k: int, eos_ids: tuple[int, ...]
) -> tuple[list[list[float]], list[list[int]]]:
    """Of every row the k best tokens, and their log-probabilities among the likely ones, under the
    draft and with the row's own noise."""
    rows = [batch.row(r) for r in range(len(logits))]
    scores = apply_penalties(logits.float(), batch, eos_ids)
    scores, ids = scores.topk(min(max(LIKELY, k), scores.shape[1]))
    heated = [r for r, row in enumerate(rows) if row.params.temperature > 0]
    if heated:
        device, hot = scores.device, [rows[r] for r in heated]
        heat = torch.tensor([row.params.temperature for row in hot], device=device)
        keys = [counter(r.params.seed or 0, r.params.sample_index, r.position) for r in hot]
        drawn = noise_of(torch.tensor(keys, device=device), ids[heated])
        scores[heated] = scores[heated] / heat[:, None] + drawn
    top = torch.log_softmax(scores, -1).topk(min(k, scores.shape[1]))
    return top.values.tolist(), ids.gather(1, top.indices).tolist()
