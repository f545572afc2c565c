"""Attention on the CPU: our own kernel, in the canonical order. The default without a GPU.

`lower` turns a plan into what the kernel reads: who sees what, which rows are computed together, the constants of every layer. The
kernel knows no window, no causality and no modes, only positions; it is compiled once per machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep import order
from lockstep.attention import base
from lockstep.kernels.cpu import attend as kernels
from lockstep.kernels.cpu.attend import Consts, Rows, Shape, Table
from lockstep.kv.pool import Keys
from lockstep.plan.image import Views
from lockstep.plan.step import Group, PagedGroup, StepPlan
from lockstep.types import INT32_MAX, KV_BYTES, AttnSpec, GroupSpec, Layout, RuleError

CAPS = base.Caps(
    devices=frozenset({"cpu"}),
    kv_dtypes=frozenset(KV_BYTES),
    layouts=frozenset(Layout),
    head_multiple=8,
    head_max=576,
    invariances=base.INVARIANCES,
)

BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


@dataclass(frozen=True, eq=False)
class Handle:
    """A lowered group: everything the kernel takes besides tensors."""

    spec: GroupSpec
    table: Table
    rows: Rows
    blocks: NDArray[np.int32]
    page_size: int
    split: int
    layers: dict[AttnSpec, tuple[Consts, NDArray[np.float32]]]


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
            Table(*map(np.asarray, (page_ids, page_indptr, first_pos, start, tail_indptr, tail_slots))),
            Rows(lo, hi),
            blocks(plan, block_rows(group.spec)),
            page_size,
            split_for(plan, group),
            {attn: constants(attn, group.spec.heads) for attn in group.spec.layers},
        )

    def attend(self, q: Tensor, keys: Keys, handle: Handle, spec: AttnSpec) -> tuple[Tensor, Tensor]:
        """One call of the kernel."""
        group = handle.spec
        rows, heads, d_qk = q.shape
        if q.dtype is not torch.float32 or heads != group.heads or d_qk != group.d_qk:
            rule = f"queries are float32 of [rows, {group.heads}, {group.d_qk}]"
            raise RuleError(rule, f"{q.dtype} of {list(q.shape)}", "Cast them, or use another backend")
        out, lse2 = np.empty((rows, heads, group.d_v), np.float32), np.empty((rows, heads), np.float32)
        if rows:
            (k, k_slot, k_head), (v, v_slot, v_head) = flat(keys.k), flat(keys.v)
            tile = order.tile_len(group.d_qk, group.d_v)
            shape = Shape(group.kv_heads, handle.page_size, tile, handle.split, k_slot, k_head, v_slot, v_head)
            consts, sink2 = handle.layers[spec]
            kernel()(q.contiguous().numpy(), k, v, out, lse2, handle.table, handle.rows, handle.blocks, shape, consts, sink2)
        return torch.from_numpy(out), base.natural(torch.from_numpy(lse2))


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
    """[NB, 3] (request, first row, end row): every request's rows, cut into blocks of at most `rows`."""
    counts = -(-plan.new_lens // rows)
    request = np.repeat(np.arange(plan.bucket.requests, dtype=np.int32), counts)
    nth = np.arange(len(request), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.int32)
    begin = plan.q_indptr[request] + nth * np.int32(rows)
    return np.stack((request, begin, np.minimum(begin + np.int32(rows), plan.q_indptr[request + 1])), 1)


def lists(plan: StepPlan, group: Group, views: Views) -> tuple[Any, Any, Any]:
    """start, tail_indptr and tail_slots of a group. Only a causal cache has tree rows."""
    if isinstance(group, PagedGroup) and group.spec.causal:
        return views.start, views.tail_indptr, views.tail_slots
    rows = plan.bucket.tokens
    return np.full(rows, INT32_MAX, np.int32), np.zeros(rows + 1, np.int32), np.zeros(0, np.int32)


def constants(attn: AttnSpec, heads: int) -> tuple[Consts, NDArray[np.float32]]:
    """What a layer's kernel call needs of its spec."""
    pre, c = base.score_constants(attn)
    return Consts(pre, c, base.value_scale(attn)), base.sink_logits2(attn, heads)


def flat(t: Tensor) -> tuple[NDArray[Any], int, int]:
    """[slots, kv_heads, d] as a flat array of its bits, and the strides of a slot and of a head."""
    slot, head, _ = t.stride()
    bits = t if t.dtype is torch.float32 else t.view(BITS[t.dtype])
    if not t.is_contiguous():
        bits = bits.as_strided((1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)),), (1,))
    return bits.numpy().reshape(-1), slot, head
