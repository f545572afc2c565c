"""The executable definition of attention: float64, a row at a time, from the address formula.

Never tuned and never adapted to a backend: it derives positions, window and causality by itself.
`attend_row` is also the formula of the lab's oracle, which knows no pages at all."""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.attention import base
from lockstep.kv.pool import Keys, _bits
from lockstep.plan import address
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket
from lockstep.types import KV_FORMATS, AttnSpec, GroupSpec, Layout

CAPS = replace(
    base.EVERY_FEATURE,
    devices=frozenset({"cpu", "cuda"}),
    activation_dtypes=frozenset({"float32", "bfloat16", "float16"}),
    kv_dtypes=frozenset(KV_FORMATS),
    head_max=1 << 20,
)


class Backend(base.Backend):
    """Has no state and derives nothing: `attend` applies the address formula to every key of every
    row. The handle is the group's spec and its arrays in the image."""

    caps = CAPS

    def bind(self, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Hashable) -> Any:
        return spec, views

    def attend(self, q: Tensor, keys: Keys, handle: Any, spec: AttnSpec) -> tuple[Tensor, Tensor]:
        """Computes one row after the other."""
        group, arrays = handle
        out = q.new_zeros(*q.shape[:2], keys.v.shape[2])
        lse = q.new_zeros(q.shape[:2], dtype=torch.float32)
        views = PlanArrays(*[torch.as_tensor(a).cpu().numpy() for a in vars(arrays).values()])
        for row in range(len(q)):
            slots = torch.from_numpy(_slots(views, group, row))
            k, v = (_bits(kept)[slots].view(kept.dtype).double() for kept in keys)
            true = (k * spec.k_scale, v * spec.v_scale)
            out[row], lse[row] = attend_row(q[row].double(), *true, spec)
        return out, lse


def attend_row(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """Softmax attention of one query. q [heads, d_qk], k [n, kv_heads, d_qk], v [n, kv_heads, d_v],
    float64, unscaled. Returns out [heads, d_v], lse [heads]; 0 and -inf without keys and sinks."""
    group = q.shape[0] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("hd,nhd->hn", q, k) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    if spec.sinks is not None:
        scores = torch.cat((scores, scores.new_tensor(spec.sinks)[:, None]), 1)
        v = torch.cat((v, v.new_zeros(1, *v.shape[1:])))
    if scores.shape[1] == 0:
        return v.new_zeros(len(q), v.shape[2]), v.new_full((len(q),), -math.inf)
    lse = torch.logsumexp(scores, 1)
    return torch.einsum("hn,nhd->hd", torch.exp(scores - lse[:, None]), v), lse


def _slots(views: PlanArrays, spec: GroupSpec, row: int) -> NDArray[np.int64]:
    request = int(np.searchsorted(views.q_indptr, row, side="right")) - 1
    p, kv_len = int(views.positions[row]), int(views.kv_lens[request])
    first = 0 if spec.window is None else max(0, p - spec.window + 1)
    last = p if spec.causal else kv_len - 1
    seen = np.arange(first, last + 1)
    if spec.layout is Layout.FRESH:
        return np.asarray(int(views.q_indptr[request]) + seen, np.int64)
    start = min(int(views.start[row]), last + 1) if spec.causal else last + 1
    below, above = seen[seen < start], seen[seen >= start]
    pages = (views.page_ids, views.page_indptr, views.first_pos)
    from_pages = address.paged(*pages, spec.page_size, request, below)
    from_list = address.listed(views.tail_slots, views.tail_indptr, views.start, row, above)
    return np.concatenate((from_pages, from_list)).astype(np.int64)
