"""Attention on an NVIDIA GPU (sm_90): our own Triton kernels, in the canonical order of that device
class.

`lower` cuts a step into items: requests with few rows get a program per split, the others a program
per block. `attend` launches. Knows plans, views on the device and the kernels' interface
(`kernels/triton/launch.py`); Triton itself is imported by the first launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep import order
from lockstep.attention import base
from lockstep.kernels.triton import items, launch, tuning
from lockstep.kernels.triton.launch import Addresses, Call, Scoring, Scratch, Shape, Tuning
from lockstep.kv.pool import Keys, widened
from lockstep.plan.image import Views
from lockstep.plan.step import FreshGroup, Group, PagedGroup, StepPlan
from lockstep.types import INT32_MAX, AttnSpec, GroupSpec, Layout, RuleError

CAPS = base.Caps(
    devices=frozenset({"cuda"}),
    activation_dtypes=frozenset({"bfloat16", "float16"}),
    kv_dtypes=frozenset({"bfloat16", "float8_e4m3"}),
    layouts=frozenset(Layout),
    head_multiple=8,
    head_max=576,
    page_sizes=base.ANY_PAGE_SIZE,
    window=True,
    non_causal=True,
    soft_cap=True,
    sinks=True,
    tails=True,
    order="canonical",
    invariances=base.INVARIANCES - {"threads"},
)
COMPUTE = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch of the kernel: its items on the device, and its launch shape."""

    table: Tensor
    tuning: Tuning


@dataclass(frozen=True, eq=False)
class Handle:
    """A lowered group: everything the kernel takes besides queries and keys."""

    spec: GroupSpec
    order: order.AttentionOrder
    addresses: Addresses
    launches: tuple[Launch, ...]
    scratch: Scratch
    tree: bool
    scoring: dict[AttnSpec, Scoring]


class Backend:
    """Two methods, no state."""

    caps = CAPS

    def lower(self, plan: StepPlan, group: Group, views: Views) -> Handle:
        """Host work of a step, once per group."""
        spec = group.spec
        device = torch.as_tensor(views.positions).device
        chosen = order.attention_order(order.SM90, spec.d_qk, spec.d_v)
        rows = seen_rows(plan, group)
        tree = isinstance(group, PagedGroup) and spec.causal and plan.bucket.tail > 0
        work = [
            (shape, lowered(rows, requests, spec, shape, chosen, parts))
            for shape, requests, parts in tuning.choose(
                spec, rows, device.type == "cuda", tree, chosen
            )
        ]
        return Handle(
            spec=spec,
            order=chosen,
            addresses=addresses(plan, group, views, device),
            launches=tuple(
                Launch(torch.from_numpy(made.table).to(device), shape) for shape, made in work
            ),
            scratch=scratch_for([made for _, made in work], spec, device),
            tree=tree,
            scoring={attn: scoring(attn, spec, device) for attn in dict.fromkeys(spec.layers)},
        )

    def attend(
        self, q: Tensor, keys: Keys, handle: Handle, spec: AttnSpec
    ) -> tuple[Tensor, Tensor]:
        """A launch per tuning; none where there are no rows."""
        group = handle.spec
        check(q, keys, group)
        d_qk, d_v = order.stored_len(group.d_qk), order.stored_len(group.d_v)
        out = torch.empty(*q.shape[:2], d_v, dtype=q.dtype, device=q.device)
        call = Call(
            q=widened(q, d_qk),
            keys=(keys.k, keys.v),
            out=out,
            lse=torch.empty(*q.shape[:2], dtype=torch.float32, device=q.device),
            at=handle.addresses,
            scoring=handle.scoring[spec],
            shape=Shape(
                d_qk=d_qk,
                d_v=d_v,
                tile=handle.order.tile,
                latent=group.layout is Layout.LATENT,
                cap=spec.soft_cap is not None,
                tree=handle.tree,
            ),
            order=handle.order,
        )
        for one in handle.launches:
            launch.launch(call, one.table, handle.scratch, one.tuning)
        return out if d_v == group.d_v else out[..., : group.d_v], call.lse


def check(q: Tensor, keys: Keys, group: GroupSpec) -> None:
    """Refuses queries and keys that no kernel takes."""
    if q.dtype not in COMPUTE or q.shape[1:] != (group.heads, group.d_qk):
        rule = f"queries are bfloat16 or float16 of [rows, {group.heads}, {group.d_qk}]"
        raise RuleError(rule, f"{q.dtype} of {list(q.shape)}", "Cast them, or use another backend")
    if keys.k.dtype not in (q.dtype, torch.float8_e4m3fn):
        rule = f"K and V are {q.dtype}, like the queries, or float8_e4m3"
        raise RuleError(rule, f"{keys.k.dtype}", "Set kv_cache_dtype")


def lowered(
    rows: items.Rows,
    requests: NDArray[np.int64],
    spec: GroupSpec,
    shape: Tuning,
    chosen: order.AttentionOrder,
    parts: NDArray[np.bool_],
) -> items.Items:
    """The items of one launch."""
    group = tuning.group_of(spec, shape)
    return items.items(rows, requests, group, shape.rows, chosen.splits, parts)


def seen_rows(plan: StepPlan, group: Group) -> items.Rows:
    """Who sees what, on the host."""
    lo, hi = base.visible(plan, group)
    if isinstance(group, FreshGroup):
        return items.Rows(plan.q_indptr, lo, hi, hi, plan.q_indptr[:-1])
    entries = items.page_entries(group.page_indptr, group.first_pos, group.spec.page_size)
    return items.Rows(plan.q_indptr, lo, hi, plan.start if group.spec.causal else hi, entries)


def addresses(plan: StepPlan, group: Group, views: Views, device: torch.device) -> Addresses:
    """The device's arrays. A fresh group's rows are pages of one, in order."""
    positions, start, tail_indptr = (
        torch.as_tensor(x) for x in (views.positions, views.start, views.tail_indptr)
    )
    if isinstance(group, FreshGroup):
        ids = torch.arange(max(plan.bucket.tokens, 1), dtype=torch.int32, device=device)
        return Addresses(positions, start, tail_indptr, ids[:0], ids, 1)
    return Addresses(
        positions,
        start,
        tail_indptr,
        torch.as_tensor(views.tail_slots),
        torch.as_tensor(views.page_ids),
        group.spec.page_size,
    )


def scratch_for(made: Sequence[items.Items], spec: GroupSpec, device: torch.device) -> Scratch:
    """Room for the parts of one launch at a time."""
    rows, counters = (
        max((m.part_rows for m in made), default=0),
        max((m.counters for m in made), default=0),
    )
    return launch.scratch(
        rows * spec.kv_heads, counters * spec.kv_heads, order.stored_len(spec.d_v), device
    )


def scoring(attn: AttnSpec, spec: GroupSpec, device: torch.device) -> Scoring:
    """What a layer's launch needs of its spec."""
    pre, c = base.score_constants(attn)
    sinks2: NDArray[np.float32] = base.sink_logits2(attn, spec.heads)
    return Scoring(
        c=c,
        pre=pre,
        v_scale=base.value_scale(attn),
        sinks2=torch.from_numpy(sinks2).to(device),
        window=INT32_MAX if spec.window is None else spec.window,
        causal=spec.causal,
    )
