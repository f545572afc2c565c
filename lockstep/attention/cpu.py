"""Attention on the CPU: our own kernel, in the canonical order. The default without a GPU.

`lower` turns a plan into what the kernel reads: who sees what, which rows are computed together,
the constants of every layer. The kernel knows no window, no causality and no modes, only positions;
it is compiled once per machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep import order
from lockstep.attention import base
from lockstep.kernels.cpu import attend as kernels
from lockstep.kernels.cpu.attend import Consts, Layer, Prepared, Rows, Shape, Table
from lockstep.kv.pool import Keys, widened
from lockstep.plan.image import Views
from lockstep.plan.step import Group, PagedGroup, StepPlan
from lockstep.types import INT32_MAX, KV_FORMATS, AttnSpec, GroupSpec, Layout, RuleError

CAPS = base.Caps(
    devices=frozenset({"cpu"}),
    activation_dtypes=frozenset({"float32"}),
    kv_dtypes=frozenset(KV_FORMATS),
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
    invariances=base.INVARIANCES,
)


@dataclass(frozen=True, eq=False)
class Handle:
    """A lowered group: everything the kernel takes besides tensors."""

    spec: GroupSpec
    table: Table
    rows: Rows
    blocks: NDArray[np.int32]
    page_size: int
    split: int
    layers: dict[AttnSpec, Layer]

    @cached_property
    def prepared(self) -> Prepared:
        """What all layers share, as the kernel wants it."""
        return kernels.Prepared(self.table, self.rows, self.blocks)


class Backend:
    """Two methods, no state."""

    caps = CAPS

    def lower(self, plan: StepPlan, group: Group, views: Views) -> Handle:
        """Host work of a step, once per group."""
        lo, hi = base.visible(plan, group)
        page_ids, page_indptr, first_pos, page_size = base.addresses(plan, group, views)
        start, tail_indptr, tail_slots = lists(plan, group, views)
        return Handle(
            group.spec,
            Table(page_ids, page_indptr, first_pos, start, tail_indptr, tail_slots),
            Rows(lo, hi),
            blocks(plan, block_rows(group.spec)),
            page_size,
            split_for(plan, group),
            {attn: constants(attn, group.spec.heads) for attn in dict.fromkeys(group.spec.layers)},
        )

    def attend(
        self, q: Tensor, keys: Keys, handle: Handle, spec: AttnSpec
    ) -> tuple[Tensor, Tensor]:
        """One call of the kernel."""
        group = handle.spec
        rows, heads, d_qk = q.shape
        if q.dtype is not torch.float32 or heads != group.heads or d_qk != group.d_qk:
            rule = f"queries are float32 of [rows, {group.heads}, {group.d_qk}]"
            raise RuleError(
                rule, f"{q.dtype} of {list(q.shape)}", "Cast them, or use another backend"
            )
        out, lse2 = torch.empty(rows, heads, order.stored_len(group.d_v)), torch.empty(rows, heads)
        if rows:
            (k, v), tile = keys, order.tile_len(group.d_qk, group.d_v)
            q = widened(q, order.stored_len(d_qk)).contiguous()
            shape = Shape(
                kv_heads=group.kv_heads,
                page_size=handle.page_size,
                tile=tile,
                split=handle.split,
                k_slot=k.stride(0),
                k_head=k.stride(1),
                v_slot=v.stride(0),
                v_head=v.stride(1),
                code=KV_FORMATS[group.kv_dtype].code,
            )
            kernel()(q, k, v, out, lse2, handle.prepared, shape, handle.layers[spec])
        return narrowed(out, group.d_v), torch.from_numpy(
            base.natural(lse2.numpy())
        )  # a few numbers: numpy is quicker there


def narrowed(out: Tensor, d_v: int) -> Tensor:
    """The head's own columns of the output: those of the padding are dropped."""
    return out if out.shape[2] == d_v else out[..., :d_v]


def kernel() -> Callable[..., None]:
    """The compiled kernel."""
    return kernels.attend


def split_for(plan: StepPlan, group: Group) -> int:
    """Keys per split: of the head sizes, and of nothing else."""
    return order.split_len(group.spec.d_qk, group.spec.d_v)


def block_rows(spec: GroupSpec) -> int:
    """Tokens computed together. Changes speed, never bits."""
    return kernels.block_rows(spec.group_size, spec.d_qk, spec.d_v)


def blocks(plan: StepPlan, rows: int) -> NDArray[np.int32]:
    """[NB, 3] (request, first row, end row): every request's rows, cut into blocks of at most
    `rows`."""
    request = np.arange(plan.bucket.requests, dtype=np.int32)
    if 0 < plan.bucket.width <= rows:
        return np.stack((request, plan.q_indptr[:-1], plan.q_indptr[1:]), 1)
    counts = -(-plan.new_lens // rows)
    request = np.repeat(request, counts)
    nth = np.arange(len(request), dtype=np.int32) - np.repeat(
        np.cumsum(counts) - counts, counts
    ).astype(np.int32)
    begin = plan.q_indptr[request] + nth * np.int32(rows)
    return np.stack(
        (request, begin, np.minimum(begin + np.int32(rows), plan.q_indptr[request + 1])), 1
    )


def lists(plan: StepPlan, group: Group, views: Views) -> tuple[Any, Any, Any]:
    """start, tail_indptr and tail_slots of a group. Only a causal cache has tree rows."""
    if isinstance(group, PagedGroup) and group.spec.causal:
        return views.start, views.tail_indptr, views.tail_slots
    rows = plan.bucket.tokens
    return np.full(rows, INT32_MAX, np.int32), np.zeros(rows + 1, np.int32), np.zeros(0, np.int32)


def constants(attn: AttnSpec, heads: int) -> Layer:
    """What a layer's kernel call needs of its spec."""
    pre, c = base.score_constants(attn)
    return kernels.layer(Consts(pre, c, base.value_scale(attn)), base.sink_logits2(attn, heads))
