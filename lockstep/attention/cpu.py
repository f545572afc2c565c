"""Attention on the CPU: our own kernel, in the canonical order. The default without a GPU.

`lower` derives what rows see and which are computed together; `bind` adds the layers' constants."""

from collections import namedtuple
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep import order
from lockstep.attention import base
from lockstep.kernels.cpu import advance, attend, threads
from lockstep.kernels.cpu.threads import address_of, empty
from lockstep.kv.pool import Keys, pad_columns
from lockstep.ops import transparent
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket, Group, StepPlan
from lockstep.types import INT32_MAX, KV_FORMATS, AttnSpec, GroupSpec, RuleError

BLOCK_ROWS = 128  # enough to hide the staging of a tile; queries and accumulators stay in L2
PRODUCTS_PER_NS = 8  # of one thread, estimated
CAPS = replace(
    base.EVERY_FEATURE,
    devices=frozenset({"cpu"}),
    activation_dtypes=frozenset({"float32"}),
    kv_dtypes=frozenset(KV_FORMATS),
    head_multiple=8,
    head_max=576,
    graphs=True,
    chains=True,
    order="canonical",
    invariances=base.INVARIANCES,
)


# Where keys are: int32 arrays of the image (`PlanArrays`), addressed as in plan/address.py. What
# row t sees: positions lo[t] <= p < hi[t]. Which rows are computed together: blocks [NB, 3],
# contiguous, (request, row begin, row end), which cover every row once; some may be empty.
Table = namedtuple(
    "Table", "page_ids page_indptr first_pos start tail_indptr tail_slots lo hi blocks"
)


@dataclass(frozen=True, eq=False)
class Handle:
    """A bound group: everything the kernel takes besides tensors."""

    spec: GroupSpec
    table: Table  # keeps its arrays alive
    page_size: int  # slots per page
    tile: int  # a multiple of 16
    split: int  # a multiple of tile
    largest: int  # rows of a block, at most
    layers: dict[AttnSpec, Tensor]  # `constants`
    # results of `prepared`, by its arguments and `threads.setting`
    calls: dict[Any, tuple[threads.Call, int]] = field(default_factory=dict, init=False)

    def prepared(self, work: Any, keys: tuple[int, ...]) -> tuple[threads.Call, int]:
        """Returns the call of kernel `work`, without addresses of tensors, and the bytes of memory
        that each of its threads needs. `keys`: bytes per number, then strides of k and v."""
        spec, table, blocks = self.spec, self.table, len(self.table.blocks)
        item, *strides = keys
        d_qk, d_v = order.stored_len(spec.d_qk), order.stored_len(spec.d_v)
        *areas, each = attend.layout(d_qk, d_v, self.tile, self.largest * spec.group_size)
        # estimate of the pages that all rows see together: all pages times the rows per request
        pages_seen = len(table.page_ids) * len(table.lo) // max(1, len(table.page_indptr) - 1)
        products = pages_seen * self.page_size * spec.heads * (d_qk + d_v)
        cost_ns = products // PRODUCTS_PER_NS
        code = KV_FORMATS[spec.kv_dtype].code
        group = (spec.kv_heads, self.page_size, self.tile, self.split, code)
        arrays = (*map(address_of, table), blocks)
        sizes = (0, spec.heads, spec.group_size, d_qk, d_v, *(item * step for step in strides))
        entries = (*[0] * 5, *arrays, *group, *sizes, 0, each, *areas)
        units = blocks * spec.kv_heads
        return threads.Call(work, entries, units, threads.team(units, cost_ns), cost_ns), each


class Backend(base.ChainBackend):
    """Caches the constants of layers, and nothing of a step."""

    caps = CAPS

    def __init__(self) -> None:
        self._layers = cache(layers)

    def derived_len(self, spec: GroupSpec, bucket: Bucket) -> int:
        """Returns the room for lo and hi of every row, and for three numbers per block."""
        return 2 * bucket.tokens + 3 * most_blocks(spec, bucket)

    def lower(self, plan: StepPlan, group: Group, views: PlanArrays) -> None:
        """Writes what each row sees, and the blocks; those that are not needed are empty."""
        (lo, hi), rows = base.visible(plan, group), plan.bucket.tokens
        cut = blocks(plan, block_rows(group.spec)).reshape(-1)
        views.derived[:rows] = lo
        views.derived[rows : 2 * rows] = hi
        views.derived[2 * rows : 2 * rows + len(cut)] = cut
        views.derived[2 * rows + len(cut) :] = 0

    def bind(self, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Hashable) -> Handle:
        """Returns the group's arrays in the image as the kernel takes them."""
        page_ids, page_indptr, first_pos, page_size = base.addresses(spec, views)
        rows, derived = bucket.tokens, views.derived.numpy()  # slicing in torch releases the GIL
        seen = (derived[:rows], derived[rows : 2 * rows], derived[2 * rows :].reshape(-1, 3))
        table = Table(page_ids, page_indptr, first_pos, *base.slot_lists(spec, views), *seen)
        return Handle(
            spec=spec,
            table=table,
            page_size=page_size,
            tile=order.tile_len(spec.d_qk, spec.d_v),
            split=order.SPLIT_LEN,
            largest=min(block_rows(spec), bucket.width or rows),
            layers=self._layers(spec),
        )

    @transparent
    def advance(self, handle: Handle, views: PlanArrays, counters: Tensor | None) -> None:
        """Advances the step in the image: one kernel call."""
        table = handle.table
        arrays = [views.positions, views.kv_lens, views.write_slots, table.lo, table.hi]
        arrays += [table.page_ids, table.page_indptr, table.first_pos]
        first = (0, 0, 0)
        if counters is not None:
            first = (address_of(views.start), address_of(counters), counters.stride(0))
        sizes = (len(views.positions), handle.page_size, handle.spec.window or INT32_MAX)
        entries = (*sizes, *map(address_of, arrays), *first)
        threads.Call(advance.compiled(), entries, 1, 1, advance.COST_NS).run()

    @transparent
    def attend(
        self, q: Tensor, keys: Keys, handle: Handle, spec: AttnSpec
    ) -> tuple[Tensor, Tensor]:
        """Computes the attention of all rows: one kernel call."""
        group = handle.spec
        rows, heads, d_qk = q.shape
        if q.dtype is not torch.float32 or heads != group.heads or d_qk != group.d_qk:
            rule = f"queries are float32 of [rows, {group.heads}, {group.d_qk}]"
            got = f"{q.dtype} of {list(q.shape)}"
            raise RuleError(rule, got, "Cast them, or use another backend")
        out, lse = empty(rows, heads, order.stored_len(group.d_v)), empty(rows, heads)
        if rows:
            k, v = keys
            q = pad_columns(q, order.stored_len(d_qk)).contiguous()
            call(kernel(), q, k, v, out, lse, handle, handle.layers[spec])
        return out if out.shape[2] == group.d_v else out[..., : group.d_v], lse


def kernel() -> Any:
    """Returns the compiled kernel."""
    return attend.compiled()


def call(
    work: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: Handle,
    layer: Tensor,
) -> None:  # fmt: skip
    """Computes attention of T rows over paged keys and values by kernel `work`.

    q      float32 [T, H, Dqk], contiguous. Dqk and Dv are multiples of 8, at most 576.
    k, v   the pool's storage [slots, kv_heads, Dqk] and [slots, kv_heads, Dv] in the group's format
    out    float32 [T, H, Dv], contiguous; 0 for a row that sees nothing.
    lse    float32 [T, H]: ln of the softmax denominator, sink included, or -inf.
    layer  `constants`

    A row's bits depend on its query and keys alone. A block reads no slot that it does not see."""
    keys = (k.itemsize, *k.stride()[:2], *v.stride()[:2])
    known = (work, keys, threads.setting())
    if known not in handle.calls:
        handle.calls[known] = handle.prepared(work, keys)
    one, each = handle.calls[known]
    tensors = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
    memory = threads.memory(each, one.most)
    others = ((attend.LAYER, layer.data_ptr()), (attend.MEMORY, memory))
    one.run(*enumerate(tensors), *others)


def block_rows(spec: GroupSpec) -> int:
    """Returns how many rows a block has, as suits the CPU's caches. Changes speed, never bits."""
    rows = BLOCK_ROWS if max(spec.d_qk, spec.d_v) <= 256 else BLOCK_ROWS // 2
    return max(1, rows // spec.group_size)


def most_blocks(spec: GroupSpec, bucket: Bucket) -> int:
    """Returns the most blocks of a step: one per request, and one per full block of other rows."""
    requests = min(bucket.requests, bucket.tokens)
    return requests + (bucket.tokens - requests) // block_rows(spec)


def blocks(plan: StepPlan, rows: int) -> NDArray[np.int32]:
    """Returns blocks [NB, 3], (request, first row, end row), of at most `rows` rows each."""
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
    """Returns the constants of every layer of a group."""
    return {attn: constants(attn, spec.heads) for attn in dict.fromkeys(spec.layers)}


def constants(attn: AttnSpec, heads: int) -> Tensor:
    """Returns a layer's constants, float32 [3 + heads]: pre (0: no soft cap, otherwise a score x
    becomes tanh(x * pre)), c > 0 (the factor that gives a score log2 units), the factor of the
    outputs; then every head's sink in log2 units, -inf for none."""
    scales = (*base.score_constants(attn), base.value_scale(attn))
    return torch.from_numpy(np.array((*scales, *base.sink_logits2(attn, heads)), np.float32))
