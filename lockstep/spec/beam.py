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

ROOT = -1
LIKELY = 64  # tokens of a row that are looked at


class Candidate(NamedTuple):
    """A token behind another candidate, or behind the request's last token (ROOT)."""

    token: int
    parent: int
    score: float


class Beam:
    """The tree of one request in the making."""

    def __init__(self, top_k: int) -> None:
        self.top_k, self.depth = top_k, 0
        self.candidates: list[Candidate] = []
        self._level: list[int] = [ROOT]  # whose children come next
        self._rows: dict[int, int] = {ROOT: ROOT}  # candidates that were computed, as nodes

    @property
    def width(self) -> int:
        """Rows that the level has."""
        return len(self._level)

    def paths(self) -> list[list[int]]:
        """The guesses up to every node of the level."""
        return [self._path(node) for node in self._level]

    def _path(self, node: int) -> list[int]:
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.candidates[node].token)
            node = self.candidates[node].parent
        return tokens[::-1]

    def grow(self, scores: Sequence[Sequence[float]], ids: Sequence[Sequence[int]]) -> None:
        """Children of every node of the level; the best of them are the next one."""
        first = len(self.candidates)
        for node, own_scores, own_ids in zip(self._level, scores, ids, strict=True):
            base = self.candidates[node].score if node != ROOT else 0.0
            self.candidates += [
                Candidate(token, node, base + score)
                for token, score in zip(own_ids, own_scores, strict=True)
                if score > float("-inf")
            ]
        fresh = range(first, len(self.candidates))
        best = sorted(fresh, key=lambda i: -self.candidates[i].score)[: self.top_k]
        self._above, self._level = self._level, sorted(best)
        self.depth += 1

    def level(self) -> tuple[list[int], list[int], tuple[int, ...]]:
        """The rows of the level: their tokens, which rows of the level before stand above them,
        and the parents of all nodes so far."""
        rows_above = [self._above.index(self.candidates[i].parent) for i in self._level]
        for i in self._level:
            self._rows[i] = len(self._rows) - 1
        nodes = [i for i in self._rows if i != ROOT]
        parents = tuple([self._rows[self.candidates[i].parent] for i in nodes])
        return [self.candidates[i].token for i in self._level], rows_above, parents

    def tree(self, nodes: int) -> DraftTree:
        """The best `nodes` of all."""
        order = sorted(range(len(self.candidates)), key=lambda i: -self.candidates[i].score)
        kept = sorted(order[:nodes])
        number = {ROOT: 0, **{i: at for at, i in enumerate(kept, 1)}}
        parents = [number[self.candidates[i].parent] for i in kept]
        return DraftTree(tuple([self.candidates[i].token for i in kept]), tuple(parents))


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
