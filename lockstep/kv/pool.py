"""The cache on a device: what it costs, storages, and their only two writers, `write` and `move`.

Who writes also says what to read: `keys(layer, k, v)` of a group's view. Backends never write. The
bytes of a group have one formula: exactly these shapes are allocated, padding included.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.ops import Ops
from lockstep.order import stored_len
from lockstep.plan.image import PlanArrays
from lockstep.types import KV_FORMATS, GroupSpec, Layout, RuleError

Allocate = Callable[[tuple[int, int, int], torch.dtype, torch.device], Tensor]


class Keys(NamedTuple):
    """What a layer attends to: k kv_dtype [slots, kv_heads, d_qk], v kv_dtype [slots, kv_heads,
    d_v], as stored; a latent group's v is a view of k. A kernel may read memory behind the last
    column, up to `order.stored_len` of the head size: zeros in k, any finite numbers in v."""

    k: Tensor
    v: Tensor


def storage_shapes(spec: GroupSpec, num_pages: int) -> tuple[tuple[int, int, int], ...]:
    """[slots, kv_heads, columns as stored] of one layer's K and V, of its latent rows, or none."""
    slots = num_pages * spec.page_size
    if spec.layout is Layout.FRESH:
        return ()
    k, v = ((slots, spec.kv_heads, stored_len(d)) for d in (spec.d_qk, spec.d_v))
    return (k,) if spec.layout is Layout.LATENT else (k, v)


def slot_bytes(spec: GroupSpec) -> int:
    """Bytes of one token in one layer of the group."""
    numbers = sum(heads * d for _, heads, d in storage_shapes(spec, 1))
    return numbers * KV_FORMATS[spec.kv_dtype].nbytes


def group_bytes(spec: GroupSpec, num_pages: int) -> int:
    """Bytes of the group's pool, all layers, null page included."""
    return num_pages * spec.page_size * slot_bytes(spec) * len(spec.layers)


def all_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(needed_bytes: int, what: str, there: int | None = None) -> None:
    """Raises unless all memory of a device, or of this machine, could hold so many bytes."""
    there = all_bytes() if there is None else there
    if needed_bytes > there:
        rule = f"the cache fits into the {there:,} B of this machine's memory"
        got = f"{needed_bytes:,} B for {what}"
        raise RuleError(rule, got, "Lower max_total_tokens or page_size")


def empty(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory: nothing reads a slot that was not written."""
    return torch.empty(shape, dtype=dtype, device=device)


class Pool:
    """The storages of one group. The null page is zero at start, the rest whatever is allocated."""

    def __init__(
        self, spec: GroupSpec, num_pages: int, ops: Ops, allocate: Allocate = empty
    ) -> None:
        self.spec, self.num_pages, self.ops, device = spec, num_pages, ops, ops.device
        if device.type == "cpu":
            check_fits(group_bytes(spec, num_pages), f"{num_pages:,} pages of {spec.page_size:,}")
        dtype = getattr(torch, KV_FORMATS[spec.kv_dtype].torch_name)
        shapes = storage_shapes(spec, num_pages)
        self.storages: list[tuple[Tensor, ...]] = []
        self._keys: list[Keys] = []
        for _ in spec.layers:
            storages = tuple(allocate(shape, dtype, device) for shape in shapes)
            for storage in storages:
                _bits(storage)[: spec.page_size] = 0
            self.storages.append(storages)
            # a latent group has one storage, whose first columns are V
            self._keys.append(Keys(storages[0][..., : spec.d_qk], storages[-1][..., : spec.d_v]))

    def keys(self, layer: int) -> Keys:
        return self._keys[layer]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores this step's K and V rows; of a latent group k is the whole row."""
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
        """Writes this step's rows, None where it writes nothing, then names the cache."""
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
        """A fresh group moves nothing."""

    def keys(self, layer: int, k: Tensor | None, v: Tensor | None) -> Keys:
        """This step's own rows, in memory of the stored width."""
        if k is None or v is None:
            rule = "the keys of a fresh group are this step's rows"
            raise RuleError(rule, "None", "Pass k and v")
        return Keys(in_stored_memory(k), in_stored_memory(v))


def widened(rows: Tensor, columns: int) -> Tensor:
    """[T, heads, d] with columns of zeros behind its own, `columns` in all."""
    missing = columns - rows.shape[2]
    return F.pad(rows, (0, missing)) if missing else rows


def in_stored_memory(rows: Tensor) -> Tensor:
    """The same rows, with the zeros in memory that a kernel may read behind every head."""
    d = rows.shape[2]
    return rows if stored_len(d) == d else widened(rows, stored_len(d))[..., :d]


def view(spec: GroupSpec, pool: Pool | None, views: PlanArrays) -> KvWriter | UncachedKv:
    if spec.layout is Layout.FRESH:
        return UncachedKv()
    if pool is None:
        rule = "a cached group has a pool"
        raise RuleError(rule, f"{spec.layout} without one", "Make a Pool for it")
    return KvWriter(pool, views)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers where torch cannot index the type itself."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
