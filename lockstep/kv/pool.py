"""The cache on a device: how many pages each group gets, storages, and their only two writers,
`write` and `move`.

The writer also returns what to read: `keys(layer, k, v)` of a group's view. Backends never write.
The bytes of a group have one formula: exactly these shapes are allocated, padding included, and the
arithmetic is printed at start."""

import gc
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.config import EngineConfig
from lockstep.kv.tables import peak_pages
from lockstep.ops import Ops
from lockstep.order import stored_len
from lockstep.plan.image import PlanArrays
from lockstep.types import KV_FORMATS, GroupSpec, Layout, RuleError

Allocate = Callable[..., Tensor]  # shape, dtype=, device=
FRACTIONS = (0.3, 0.8)  # of the machine's, of a GPU's free memory: the default size of the cache


class Keys(NamedTuple):
    """What a layer attends to: k kv_dtype [slots, kv_heads, d_qk], v kv_dtype [slots, kv_heads,
    d_v], as stored; a latent group's v is a view of k. A kernel may read memory past the last
    column, up to `order.stored_len` of the head size: zeros in k, any finite numbers in v."""

    k: Tensor
    v: Tensor


def storage_shapes(spec: GroupSpec, num_pages: int) -> tuple[tuple[int, int, int], ...]:
    """Returns [slots, kv_heads, stored columns] of a layer's K and V, of its latent rows, or ()."""
    slots = num_pages * spec.page_size
    if spec.layout is Layout.FRESH:
        return ()
    k, v = ((slots, spec.kv_heads, stored_len(d)) for d in (spec.d_qk, spec.d_v))
    return (k,) if spec.layout is Layout.LATENT else (k, v)


def slot_bytes(spec: GroupSpec) -> int:
    """Returns the bytes of one token in one layer of the group."""
    numbers = sum(heads * d for _, heads, d in storage_shapes(spec, 1))
    return numbers * KV_FORMATS[spec.kv_dtype].nbytes


def group_bytes(spec: GroupSpec, num_pages: int) -> int:
    """Returns the bytes of the group's pool, all layers, null page included."""
    return num_pages * spec.page_size * slot_bytes(spec) * len(spec.layers)


def all_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(needed_bytes: int, what: str, total: int) -> None:
    """Raises unless `needed_bytes` fit into the `total` bytes of memory of machine or GPU."""
    if needed_bytes > total:
        rule = f"the cache fits into its device's memory of {total:,} B"
        got = f"{needed_bytes:,} B for {what}"
        raise RuleError(rule, got, "Lower max_total_tokens or page_size")


def cache_size(
    specs: Sequence[GroupSpec],
    config: EngineConfig,
    context_length: int,
    device: torch.device,
    outputs: int = 0,
) -> tuple[tuple[int, ...], str]:
    """Returns the largest cache that the budget allows and that the running requests could fill:
    pages per group (0 for a fresh one), and the arithmetic as text. A full group needs a slot per
    cached key; a window group, per running request, its window's keys plus what a step adds."""
    gpu = device.type == "cuda"
    if gpu:  # free what an earlier engine left, even if gc had frozen it
        gc.unfreeze()
        gc.collect()
    free, total = torch.cuda.mem_get_info(device) if gpu else (free_bytes(), all_bytes())
    fraction = config.mem_fraction_static or FRACTIONS[gpu]
    tokens = config.max_total_tokens or config.max_running_requests * context_length
    if config.max_total_tokens is None:
        budget = int(free * fraction) - outputs
        while tokens > 0 and total_bytes(specs, config, tokens) > budget:
            tokens = tokens * 15 // 16
        if tokens < specs[0].page_size:
            rule = "the cache holds at least one page"
            remedy = "Raise mem_fraction_static, or lower max_running_requests"
            raise RuleError(rule, f"{budget:,} B of memory for it", remedy)
    what = f"{tokens:,} tokens in pages of {specs[0].page_size:,}"
    check_fits(total_bytes(specs, config, tokens), what, total)
    pages = tuple(pages_of(spec, config, tokens) for spec in specs)
    stored = [(spec, n) for spec, n in zip(specs, pages, strict=True) if n] or [(specs[0], 0)]
    limit = f", at most {fraction} of the GPU's free {free:,} B" if gpu else ""
    if outputs and config.max_total_tokens is None:
        limit += f", less {outputs:,} B for the outputs of graphs"
    return pages, f"cache for {tokens:,} tokens{limit}\n{arithmetic(stored)}"


def pages_of(spec: GroupSpec, config: EngineConfig, tokens: int) -> int:
    """Returns the pages of one group, null page included, for `tokens` cached keys."""
    if spec.layout is Layout.FRESH:
        return 0
    return peak_pages(spec, tokens, config.chunked_prefill_size, config.max_running_requests) + 1


def total_bytes(specs: Sequence[GroupSpec], config: EngineConfig, tokens: int) -> int:
    return sum(group_bytes(spec, pages_of(spec, config, tokens)) for spec in specs)


def padding(spec: GroupSpec) -> str:
    """Returns a text that names the head sizes stored with padding; "" if there are none."""
    sizes = dict.fromkeys((spec.d_qk,) if spec.layout is Layout.LATENT else (spec.d_qk, spec.d_v))
    wider = [f"{d} stored as {stored_len(d)}" for d in sizes if stored_len(d) != d]
    return f", heads of {' and '.join(wider)}" if wider else ""


def arithmetic(groups: Sequence[tuple[GroupSpec, int]]) -> str:
    """Returns the memory of (group, pages) pairs, a line each and the sum, as printed at start."""
    lines, total = [], 0
    for spec, pages in groups:
        window = f" window {spec.window}" if spec.window else ""
        slots = f"{pages} pages x {spec.page_size} slots x {slot_bytes(spec)} B"
        nbytes = group_bytes(spec, pages)
        name = f"{spec.layout}{window} {spec.kv_dtype}{padding(spec)}"
        lines.append(f"{name}: {slots} x {len(spec.layers)} layers = {nbytes:,} B")
        total += nbytes
    return "\n".join([*lines, f"total {total:,} B"])


class Pool:
    """The storages of one group. Page 0 is zero at start; no other is read before it is written."""

    def __init__(
        self, spec: GroupSpec, num_pages: int, ops: Ops, allocate: Allocate = torch.empty
    ) -> None:
        self.spec, self.num_pages, self.ops, device = spec, num_pages, ops, ops.device
        if device.type == "cpu":
            what = f"{num_pages:,} pages of {spec.page_size:,}"
            check_fits(group_bytes(spec, num_pages), what, all_bytes())
        dtype = getattr(torch, KV_FORMATS[spec.kv_dtype].torch_name)
        shapes = storage_shapes(spec, num_pages)
        self.storages: list[tuple[Tensor, ...]] = []
        self._keys: list[Keys] = []
        for _ in spec.layers:
            storages = tuple(allocate(shape, dtype=dtype, device=device) for shape in shapes)
            for storage in storages:
                _bits(storage)[: spec.page_size] = 0
            self.storages.append(storages)
            # a latent group has one storage, whose first columns are V
            self._keys.append(Keys(storages[0][..., : spec.d_qk], storages[-1][..., : spec.d_v]))

    def keys(self, layer: int) -> Keys:
        return self._keys[layer]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores this step's K and V rows; in a latent group k is the whole row."""
        attn = self.spec.layers[layer]
        rows = ((k, attn.k_scale), (v, attn.v_scale))
        for storage, (values, scale) in zip(self.storages[layer], rows, strict=False):
            self.ops.kv_write(storage, slots, values, scale)

    def move(self, moves: Tensor) -> None:
        """Relocates rows in every layer: gather all, then scatter all."""
        self.ops.kv_move([s for layer in self.storages for s in layer], moves)


class KvWriter:
    """A paged group during one step."""

    def __init__(self, pool: Pool, views: PlanArrays) -> None:
        self.pool, self.views = pool, views
        self.slots: Tensor = views.write_slots

    def relocate(self) -> None:
        """Carries out the step's moves: once, before the first layer writes."""
        self.pool.move(self.views.moves)

    def keys(self, layer: int, k: Tensor | None, v: Tensor | None) -> Keys:
        """Writes this step's rows (None if it writes none), then returns the layer's cache."""
        count = self.slots.shape[0]
        if count:
            if k is None or v is None or k.shape[0] != count:
                got = f"{count} slots, k={k if k is None else len(k)}"
                raise RuleError("a step writes one K and one V row per slot", got, "Pass all rows")
            self.pool.write(layer, self.slots, k, v)
        return self.pool.keys(layer)


class UncachedKv:
    """A fresh group during one step: nothing to write, nothing old to read."""

    def relocate(self) -> None:
        """Does nothing: a fresh group has no moves."""

    def keys(self, layer: int, k: Tensor | None, v: Tensor | None) -> Keys:
        """Returns this step's own rows, in memory of the stored width."""
        if k is None or v is None:
            raise RuleError("a fresh group's keys are this step's rows", "None", "Pass k and v")
        return Keys(in_stored_memory(k), in_stored_memory(v))


def pad_columns(rows: Tensor, columns: int) -> Tensor:
    """Returns [T, heads, columns]: rows [T, heads, d] padded with columns of zeros."""
    missing = columns - rows.shape[2]
    return F.pad(rows, (0, missing)) if missing else rows


def in_stored_memory(rows: Tensor) -> Tensor:
    """Returns the same rows, in memory with the zeros that a kernel may read past every head."""
    d = rows.shape[2]
    return rows if stored_len(d) == d else pad_columns(rows, stored_len(d))[..., :d]


def view(spec: GroupSpec, pool: Pool | None, views: PlanArrays) -> KvWriter | UncachedKv:
    if spec.layout is Layout.FRESH:
        return UncachedKv()
    if pool is None:
        raise RuleError("a cached group has a pool", f"{spec.layout} without one", "Make a Pool")
    return KvWriter(pool, views)


def _bits(tensor: Tensor) -> Tensor:
    """Returns the same memory, as uint8 where torch cannot index the dtype itself."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
