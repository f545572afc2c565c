"""Token ids to rows at the front, rows to one vector per request at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.types import RuleError

POOLINGS = ("last", "mean", "first")


@dataclass(frozen=True, eq=False)
class Embedding:
    """weight [vocab, d]; ids [T] → [T, d], times `scale`."""

    weight: Tensor
    scale: float = 1.0

    def __call__(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype)


def pool(hidden: Tensor, q_indptr: Sequence[int], how: str) -> Tensor:
    """hidden [T, d], rows of request i from q_indptr[i] to q_indptr[i+1] → [B, d] float32 of length 1."""
    if how not in POOLINGS:
        raise RuleError(f"pooling is one of {', '.join(POOLINGS)}", repr(how), "Pick one of these")
    spans = list(pairwise(q_indptr))
    pooled = torch.stack([_pool(hidden[a:b].float(), how) for a, b in spans]) if spans else hidden.new_zeros(0, hidden.shape[1])
    length = (pooled * pooled).sum(-1, keepdim=True).sqrt()
    return pooled / length.clamp(min=1e-12)


def _pool(rows: Tensor, how: str) -> Tensor:
    if how == "mean":
        return rows.T.contiguous().sum(-1) / len(rows)  # along contiguous memory: one order, whatever the batch and the threads
    return rows[-1] if how == "last" else rows[0]
