"""A step as one int32 array, its image, which is what a device receives.

It has the token of every row, the plan's arrays and, per group, what a backend derives from them,
at the offsets of `ImageLayout`: so a buffer at a fixed address can be refilled for every step of a
bucket. `views` works on numpy arrays and on torch tensors alike."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.step import Bucket, FreshGroup, Ints, PagedGroup, StepPlan
from lockstep.types import INT32_MAX, GroupSpec, Layout

ALIGN = 4  # every array begins at a multiple of 16 bytes: kernels are compiled for that
CACHED = [field.name for field in fields(PagedGroup) if field.name != "spec"]


@dataclass(frozen=True, eq=False)
class PlanArrays:
    """The arrays of one group inside an image, in the image's own array type."""

    ids: Any  # [T] the token of every row, 0 for a pad row
    q_indptr: Any  # [B+1]
    positions: Any  # [T]
    start: Any  # [T] INT32_MAX, above every position, in groups without lists: cross and fresh
    tail_indptr: Any  # [T+1]
    emit: Any  # [S]
    kv_lens: Any  # [B]
    page_indptr: Any  # [B+1]
    page_ids: Any  # of a fresh group: its rows, as pages of one slot each, in order
    first_pos: Any  # [B]
    tail_slots: Any
    write_slots: Any  # [W]
    moves: Any  # [M, 2]
    derived: Any  # what the backend's `lower` wrote for its launch


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """Where a step's arrays are in its image: a function of these three fields alone."""

    bucket: Bucket
    specs: tuple[GroupSpec, ...]
    derived: tuple[int, ...]  # how many numbers the backend derives, per group

    @cached_property
    def length(self) -> int:
        return aligned(self._places[-1][-1][1])

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(self.bucket.of(g) for g in range(len(self.specs)))

    @cached_property
    def _places(self) -> list[list[tuple[int, int]]]:
        """Begin and end of every array: those of the rows, then of each group."""
        at, out, b = 0, list[list[tuple[int, int]]](), self.bucket
        rows = (b.tokens, b.requests + 1, b.tokens, b.tokens, b.tokens + 1, b.emits)
        for sizes in (rows, *map(self._group_sizes, range(len(self.specs)))):
            begins = list(accumulate(map(aligned, sizes), initial=at))
            at = begins.pop()
            out.append([(begin, begin + n) for begin, n in zip(begins, sizes, strict=True)])
        return out

    def views(self, image: Any) -> tuple[PlanArrays, ...]:
        """Returns, per group, its arrays as views of `image`."""
        rows, out = self.rows(image), list[PlanArrays]()
        for spec, places in zip(self.specs, self._places[1:], strict=True):
            start, *cache = (image[begin:end] for begin, end in places)
            cache[6] = cache[6].reshape(-1, 2)
            own = [*rows[:3], rows[3] if has_slot_lists(spec) else start, *rows[4:], *cache]
            out.append(PlanArrays(*own))
        return tuple(out)

    def rows(self, image: Any) -> list[Any]:
        """Returns ids, q_indptr, positions, start (if `has_slot_lists`), tail_indptr, emit."""
        return [image[begin:end] for begin, end in self._places[0]]

    def _group_sizes(self, g: int) -> tuple[int, ...]:
        """Returns the lengths of `start`, then of the fields of `PlanArrays` from `kv_lens` on."""
        bucket, b, t = self.bucket, self.bucket.requests, self.bucket.tokens
        start = 0 if has_slot_lists(self.specs[g]) else t
        pages = t if self.specs[g].layout is Layout.FRESH else bucket.pages[g]
        behind = (t * bucket.tail, bucket.writes[g], 2 * bucket.moves[g], self.derived[g])
        return (start, b, b + 1, pages, b, *behind)


def aligned(length: int) -> int:
    """Returns `length` rounded up to a multiple of ALIGN."""
    return -(-length // ALIGN) * ALIGN


def has_slot_lists(spec: GroupSpec) -> bool:
    """Whether rows of the group may have slot lists: only a causal cache has draft trees."""
    return spec.layout is not Layout.FRESH and spec.causal


def write(
    image: NDArray[np.int32], layout: ImageLayout, plan: StepPlan, ids: Sequence[int] | Ints
) -> tuple[PlanArrays, ...]:
    """Fills `image` with the plan and the tokens `ids`, zeros elsewhere; returns its views."""
    image[:] = 0
    views = layout.views(image)
    tokens, *rows = layout.rows(image)
    tokens[: len(ids)] = ids
    given = (plan.q_indptr, plan.positions, plan.start, plan.tail_indptr, plan.emit)
    for place, values in zip(rows, given, strict=True):
        place[:] = values
    for group, own in zip(plan.groups, views, strict=True):
        if not has_slot_lists(group.spec):
            own.start[:] = INT32_MAX
        if isinstance(group, FreshGroup):
            own.kv_lens[:] = plan.new_lens
            own.page_indptr[:] = plan.q_indptr
            own.page_ids[:] = np.arange(plan.bucket.tokens, dtype=np.int32)
            continue
        for name in CACHED:
            getattr(own, name)[:] = getattr(group, name)
    return views
