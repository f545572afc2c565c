"""Token ids to rows at the front, rows to one vector per request at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lockstep.ops import Ops
from lockstep.types import RuleError

POOLINGS = ("last", "mean", "first")


@dataclass(frozen=True, eq=False)
class Embedding:
    """weight [vocab, d]; ids [T] → [T, d], times `scale`."""

    weight: Tensor
    ops: Ops
    scale: float = 1.0

    def __call__(self, ids: Tensor) -> Tensor:
        hidden = self.ops.take_rows(self.weight, ids)
        if self.scale == 1.0:
            return hidden
        return hidden * torch.tensor(self.scale, dtype=hidden.dtype)


def pool(ops: Ops, hidden: Tensor, q_indptr: Sequence[int], how: str) -> Tensor:
    """hidden [T, d], rows of request i in [q_indptr[i], q_indptr[i+1]) → [B, d] of norm 1."""
    if how not in POOLINGS:
        raise RuleError(f"pooling is one of {', '.join(POOLINGS)}", repr(how), "Pick one of these")
    ends = list(pairwise(q_indptr))
    spans = [{"last": (b - 1, b), "mean": (a, b), "first": (a, a + 1)}[how] for a, b in ends]
    return ops.pool(hidden, spans)
