"""Attention on the CPU: our own kernel, in the canonical order. The default without a GPU.

`lower` derives what the kernel reads besides the plan: who sees what, and which rows are computed
together; `bind` adds the constants of every layer.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep import order
from lockstep.attention import base
from lockstep.kernels.cpu import attend as kernels
from lockstep.kernels.cpu.attend import Prepared, Shape, Table
from lockstep.kernels.cpu.threads import empty
from lockstep.kv.pool import Keys, widened
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket, Group, StepPlan
from lockstep.types import KV_FORMATS, AttnSpec, GroupSpec, Layout, RuleError

BLOCK_ROWS = 128  # that hide the staging of a tile and leave queries and accumulators in L2
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
    graphs=True,
    order="canonical",
    invariances=base.INVARIANCES,
)


@dataclass(frozen=True, eq=False)
class Handle:
    """A group, bound: everything the kernel takes besides tensors."""

    spec: GroupSpec
    prepared: Prepared
    layers: dict[AttnSpec, Tensor]  # constants


class Backend(base.Backend):
    """Keeps constants of layers, and nothing of a step."""

    caps = CAPS

    def __init__(self) -> None:
        self._layers = cache(layers)

    def derived_len(self, spec: GroupSpec, bucket: Bucket) -> int:
        """lo and hi of every row, and three numbers per block."""
        return 2 * bucket.tokens + 3 * most_blocks(spec, bucket)

    def lower(self, plan: StepPlan, group: Group, views: PlanArrays) -> None:
        """Who sees what, and the blocks; those that are not needed are empty."""
        (lo, hi), rows = base.visible(plan, group), plan.bucket.tokens
        cut = blocks(plan, block_rows(group.spec)).reshape(-1)
        views.derived[:rows] = lo
        views.derived[rows : 2 * rows] = hi
        views.derived[2 * rows : 2 * rows + len(cut)] = cut
        views.derived[2 * rows + len(cut) :] = 0

    def bind(self, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Hashable) -> Handle:
        """What the kernel finds in the image."""
        *pages, page_size = base.addresses(spec, views)
        rows, derived = bucket.tokens, views.derived
        seen = (derived[:rows], derived[rows : 2 * rows], derived[2 * rows :].reshape(-1, 3))
        table = Table(*pages, *base.lists(spec, views), *seen)
        shape = Shape(
            kv_heads=spec.kv_heads,
            page_size=page_size,
            tile=order.tile_len(spec.d_qk, spec.d_v),
            split=order.split_len(spec.d_qk, spec.d_v),
            code=KV_FORMATS[spec.kv_dtype].code,
        )
        largest = min(block_rows(spec), bucket.width or rows)
        return Handle(spec, Prepared(table, shape, largest), self._layers(spec))

    def attend(
        self, q: Tensor, keys: Keys, handle: Handle, spec: AttnSpec
    ) -> tuple[Tensor, Tensor]:
        """One call of the kernel."""
        group = handle.spec
        rows, heads, d_qk = q.shape
        if q.dtype is not torch.float32 or heads != group.heads or d_qk != group.d_qk:
            rule = f"queries are float32 of [rows, {group.heads}, {group.d_qk}]"
            got = f"{q.dtype} of {list(q.shape)}"
            raise RuleError(rule, got, "Cast them, or use another backend")
        out, lse2 = empty(rows, heads, order.stored_len(group.d_v)), empty(rows, heads)
        if rows:
            k, v = keys
            q = widened(q, order.stored_len(d_qk)).contiguous()
            kernel()(q, k, v, out, lse2, handle.prepared, handle.layers[spec])
        lse = torch.from_numpy(base.log2_to_ln(lse2.numpy()))  # few numbers: numpy is quicker
        return out if out.shape[2] == group.d_v else out[..., : group.d_v], lse


def kernel() -> Callable[..., None]:
    """The compiled kernel."""
    return kernels.attend


def block_rows(spec: GroupSpec) -> int:
    """Tokens computed together, as suits the caches. Changes speed, never bits."""
    rows = BLOCK_ROWS if max(spec.d_qk, spec.d_v) <= 256 else BLOCK_ROWS // 2
    return max(1, rows // spec.group_size)


def most_blocks(spec: GroupSpec, bucket: Bucket) -> int:
    """Blocks of any step of a bucket: one per request, and one for every full block of further
    rows."""
    requests = min(bucket.requests, bucket.tokens)
    return requests + (bucket.tokens - requests) // block_rows(spec)


def blocks(plan: StepPlan, rows: int) -> NDArray[np.int32]:
    """[NB, 3] (request, first row, end row): every request's, in blocks of at most `rows`."""
    request = np.arange(plan.bucket.requests, dtype=np.int32)
    if 0 < plan.bucket.width <= rows:
        return np.stack((request, plan.q_indptr[:-1], plan.q_indptr[1:]), 1)
    counts = -(-plan.new_lens // rows)
    request = np.repeat(request, counts)
    first = np.repeat(np.cumsum(counts) - counts, counts).astype(np.int32)
    nth = np.arange(len(request), dtype=np.int32) - first
    begin = plan.q_indptr[request] + nth * np.int32(rows)
    end = np.minimum(begin + np.int32(rows), plan.q_indptr[request + 1])
    return np.stack((request, begin, end), 1)


def layers(spec: GroupSpec) -> dict[AttnSpec, Tensor]:
    """The constants of every layer of a group."""
    return {attn: constants(attn, spec.heads) for attn in dict.fromkeys(spec.layers)}


def constants(attn: AttnSpec, heads: int) -> Tensor:
    """What the kernel is told of a layer, float32 [3 + heads]."""
    scales = (*base.score_constants(attn), base.value_scale(attn))
    return torch.from_numpy(np.array((*scales, *base.sink_logits2(attn, heads)), np.float32))
