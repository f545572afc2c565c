"""The living definition: float64, a row at a time, straight from the address formula.

Never tuned and never bent to a backend. It reads positions, window and causality from the plan and
the spec in its own plain words; `attend_row` is also the formula of the lab's oracle, which knows
no pages at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.attention.base import ANY_PAGE_SIZE, Caps
from lockstep.kv.pool import Keys
from lockstep.plan import address
from lockstep.plan.image import Views
from lockstep.plan.step import FreshGroup, Group, StepPlan
from lockstep.types import KV_FORMATS, AttnSpec, Layout

CAPS = Caps(
    devices=frozenset({"cpu", "cuda"}),
    activation_dtypes=frozenset({"float32", "bfloat16", "float16"}),
    kv_dtypes=frozenset(KV_FORMATS),
    layouts=frozenset(Layout),
    head_multiple=1,
    head_max=1 << 20,
    page_sizes=ANY_PAGE_SIZE,
    window=True,
    non_causal=True,
    soft_cap=True,
    sinks=True,
    tails=True,
)


@dataclass(frozen=True, eq=False)
class Handle:
    """For every row, the slots of the keys it sees, in position order."""

    slots: list[Tensor]


class Backend:
    """Two methods, no state."""

    caps = CAPS

    def lower(self, plan: StepPlan, group: Group, views: Views) -> Handle:
        """Asks the address formula for every key of every row."""
        return Handle(
            [torch.from_numpy(_slots(plan, group, row)) for row in range(len(plan.positions))]
        )

    def attend(
        self, q: Tensor, keys: Keys, handle: Handle, spec: AttnSpec
    ) -> tuple[Tensor, Tensor]:
        """One row after the other."""
        out = torch.zeros(*q.shape[:2], keys.v.shape[2])
        lse = torch.full(q.shape[:2], -math.inf)
        for row, slots in enumerate(handle.slots):
            k, v = (_load(t, slots) for t in keys)
            out[row], lse[row] = attend_row(
                q[row].double(), k * spec.k_scale, v * spec.v_scale, spec
            )
        return out, lse


def attend_row(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """Softmax attention of one query. q [heads, d_qk], k [n, kv_heads, d_qk], v [n, kv_heads, d_v],
    float64, true values.

    Returns out [heads, d_v] and lse [heads], the natural log of the denominator; with no keys and
    no sink, 0 and -inf.
    """
    group = q.shape[0] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("hd,nhd->hn", q, k) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    if spec.sinks is not None:
        scores = torch.cat((scores, torch.tensor(spec.sinks, dtype=torch.float64)[:, None]), 1)
        v = torch.cat(
            (v, torch.zeros_like(v[:1]) if len(v) else torch.zeros(1, *v.shape[1:], dtype=v.dtype))
        )
    if scores.shape[1] == 0:
        return torch.zeros(q.shape[0], v.shape[2], dtype=torch.float64), torch.full(
            (q.shape[0],), -math.inf, dtype=torch.float64
        )
    lse = torch.logsumexp(scores, 1)
    return torch.einsum("hn,nhd->hd", torch.exp(scores - lse[:, None]), v), lse


def _slots(plan: StepPlan, group: Group, row: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    request, p = int(plan.request[row]), int(plan.positions[row])
    first = 0 if group.spec.window is None else max(0, p - group.spec.window + 1)
    if isinstance(group, FreshGroup):
        begin = int(plan.q_indptr[request])
        last = p if group.spec.causal else int(plan.q_indptr[request + 1]) - begin - 1
        return np.arange(begin + first, begin + last + 1)
    last = p if group.spec.causal else int(group.kv_lens[request]) - 1
    seen = np.arange(first, last + 1)
    start = min(int(plan.start[row]), last + 1) if group.spec.causal else last + 1
    below, above = seen[seen < start], seen[seen >= start]
    from_pages = address.paged(
        group.page_ids, group.page_indptr, group.first_pos, group.spec.page_size, request, below
    )
    from_list = address.listed(group.tail_slots, plan.tail_indptr, plan.start, row, above)
    return np.concatenate((from_pages, from_list)).astype(np.int64)


def _load(stored: Tensor, slots: Tensor) -> Tensor:
    if stored.itemsize == 1:  # torch indexes no narrow float
        return stored.view(torch.uint8)[slots].view(stored.dtype).double()
    return stored[slots].double()
