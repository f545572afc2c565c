"""A step on its way to a launch: `lower` on the host, into the arena, then `bind`, and the value
that a model's layers are passed.

A launch moves the keys that the plan relocates, then, layer by layer, writes this step's keys and
attends: always in this order, in one place. A bound step knows addresses, no request and no plan.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lockstep.attention.base import Backend, ChainBackend
from lockstep.kv import pool as kv
from lockstep.ops import operation
from lockstep.plan import image as plan_image
from lockstep.plan.image import ImageLayout, PlanArrays
from lockstep.plan.step import Bucket, Ints, StepPlan
from lockstep.types import GroupSpec, RuleError

if TYPE_CHECKING:
    from lockstep.nn.attention import GroupLayer  # importing it loads the kernels

Variants = tuple[Hashable, ...]  # per group, the launch variant where the bucket leaves it open


class Arena:
    """Room for an image of `capacity` int32 at one address: with weights and cache, all that a
    launch reads. Fill `host`; `load` copies it to the device, one copy per step. A GPU has two host
    buffers, used alternately, and one is refilled only when its copy has finished."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._slots = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(1 + pinned)
        ]
        event: Any = torch.cuda.Event
        self._copied = [event() for _ in self._slots] if pinned else []
        self._arrays = [slot.numpy() for slot in self._slots]
        self._turn = 0
        self._image = self.buffer[:0]  # the last loaded image

    def host(self, length: int) -> Ints:
        """Returns the host buffer for an image of `length` numbers, after its last copy is done."""
        if length > len(self.buffer):
            rule = f"a step's image has at most {len(self.buffer)} numbers"
            raise RuleError(rule, str(length), "Schedule less per step, or enlarge the arena")
        self._turn = (self._turn + 1) % len(self._slots)
        if self._copied and not self._copied[self._turn].query():
            self._copied[self._turn].synchronize()
        return self._arrays[self._turn][:length]

    def load(self, length: int) -> Tensor:
        """Copies the image to the device and returns it there."""
        if self._image.shape[0] != length:
            self._image = self.buffer[:length]
        if self._copied:
            self._image.copy_(self._slots[self._turn][:length], non_blocking=True)
            self._copied[self._turn].record()
        else:  # numpy copies on this thread
            self._image.numpy()[:] = self._arrays[self._turn][:length]
        return self._image


@dataclass(frozen=True, eq=False)
class Step:
    """One step, ready to run. `layer_map` gives a model's attention layers their groups."""

    specs: tuple[GroupSpec, ...]
    stores: tuple[kv.KvWriter | kv.UncachedKv, ...]
    handles: tuple[Any, ...]
    layer_map: "Sequence[GroupLayer]"
    views: Sequence[PlanArrays]
    backend: Backend
    attend_keys: Callable[..., tuple[Tensor, Tensor]]  # the backend's `attend`, as an operation

    def relocate(self) -> None:
        """Carries out the plan's moves: once, before the first layer writes."""
        for store in self.stores:
            store.relocate()

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """q [T, heads, d_qk], k [T, kv_heads, d_qk], v [T, kv_heads, d_v] of this step's rows;
        returns [T, heads, d_v]. A decoder's cross attention only reads: it has no k and v."""
        at = self.layer_map[layer]
        store, spec = self.stores[at.group], self.specs[at.group].layers[at.layer]
        handle = self.handles[at.group]
        out, _ = self.attend_keys(q, store.keys(at.layer, k, v), handle, spec)
        return out

    def advance(self, counters: Tensor | None) -> None:
        """Turns this step into the next one of a chain (needs `Caps.chains`)."""
        move_on = operation(cast(ChainBackend, self.backend).advance)
        for handle, own in zip(self.handles, self.views, strict=True):
            move_on(handle, own, counters)
            counters = None

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes keys that no row of this step attends to: an encoder's, for cross attention."""
        at = self.layer_map[layer]
        self.stores[at.group].keys(at.layer, k, v)


def layout_of(bucket: Bucket, specs: tuple[GroupSpec, ...], backend: Backend) -> ImageLayout:
    """Returns where a step's numbers are in its image, for this backend."""
    derived = [backend.derived_len(spec, bucket.of(g)) for g, spec in enumerate(specs)]
    return ImageLayout(bucket, specs, tuple(derived))


def lower(
    plan: StepPlan, ids: Sequence[int] | Ints, backend: Backend, layout: ImageLayout, image: Ints
) -> Variants:
    """Host: fills a step's image, including what the backend derives. Touches no cache."""
    views = plan_image.write(image, layout, plan, ids)
    pairs = zip(plan.groups, views, strict=True)
    return tuple([backend.lower(plan, group, own) for group, own in pairs])


def handles_of(
    layout: ImageLayout, views: Sequence[PlanArrays], variants: Variants, backend: Backend
) -> tuple[Any, ...]:
    groups = enumerate(zip(layout.specs, views, variants, strict=True))
    return tuple([backend.bind(s, layout.buckets[g], own, v) for g, (s, own, v) in groups])


def bind(
    layout: ImageLayout,
    views: Sequence[PlanArrays],
    variants: Variants,
    backend: Backend,
    pools: Sequence[kv.Pool | None],
    layer_map: "Sequence[GroupLayer]",
) -> Step:
    """Returns the step of an image on the device. `pools` has one entry per group."""
    groups = zip(layout.specs, pools, views, strict=True)
    return Step(
        specs=layout.specs,
        stores=tuple([kv.view(spec, pool, own) for spec, pool, own in groups]),
        handles=handles_of(layout, views, variants, backend),
        layer_map=layer_map,
        views=views,
        backend=backend,
        attend_keys=operation(backend.attend),
    )
