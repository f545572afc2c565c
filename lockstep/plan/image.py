"""A plan as one int32 array: what a device gets, what the lab records and diffs.

The image begins with the bucket and the real counts; where each array lies is a function of the
bucket alone, so a buffer at a fixed address can be refilled for every step of a bucket. `views`
works on numpy arrays and on torch tensors alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.plan.step import Bucket, FreshGroup, Ints, PagedGroup, Real, StepPlan, ints
from lockstep.types import GroupSpec, Layout, RuleError

MAGIC = 0x4C4F434B
_SCALARS = 10  # magic, number of groups, five of the bucket, three real counts


@dataclass(frozen=True, eq=False)
class Views:
    """The arrays of one group inside an image, in the image's own array type. Cache fields of a
    fresh group are empty."""

    q_indptr: Any
    positions: Any
    start: Any
    tail_indptr: Any
    emit: Any
    kv_lens: Any
    page_indptr: Any
    page_ids: Any
    first_pos: Any
    tail_slots: Any
    write_slots: Any
    moves: Any


def pack(plan: StepPlan) -> Ints:
    """The image of `plan`."""
    parts: list[Ints] = [
        ints(_header(plan)),
        plan.q_indptr,
        plan.positions,
        plan.start,
        plan.tail_indptr,
        plan.emit,
    ]
    for group in plan.groups:
        if isinstance(group, PagedGroup):
            parts += [
                group.kv_lens,
                group.page_indptr,
                group.page_ids,
                group.first_pos,
                group.tail_slots,
                group.write_slots,
            ]
            parts.append(group.moves.reshape(-1))
    return ints(np.concatenate(parts))


def unpack(image: Ints, specs: tuple[GroupSpec, ...]) -> StepPlan:
    """The plan of an image, given the model's groups."""
    bucket, real = read_header(image)
    if len(bucket.pages) != len(specs):
        raise RuleError(
            "an image is read with the groups it was made with",
            f"{len(bucket.pages)} and {len(specs)} groups",
            "Check the model",
        )
    each = views(image, bucket, specs)
    groups = tuple(
        FreshGroup(spec)
        if spec.layout is Layout.FRESH
        else PagedGroup(
            spec,
            *map(
                ints,
                (
                    v.kv_lens,
                    v.page_indptr,
                    v.page_ids,
                    v.first_pos,
                    v.tail_slots,
                    v.write_slots,
                    v.moves,
                ),
            ),
        )
        for spec, v in zip(specs, each, strict=True)
    )
    (q_indptr, positions, start, tail_indptr, emit), _ = _take(
        image, _header_len(len(specs)), _row_sizes(bucket)
    )
    return StepPlan(
        ints(q_indptr),
        ints(positions),
        ints(start),
        ints(tail_indptr),
        ints(emit),
        groups,
        bucket,
        real,
    )


def views(image: Any, bucket: Bucket, specs: tuple[GroupSpec, ...]) -> tuple[Views, ...]:
    """Per group, where its arrays lie in `image`. Offsets depend on nothing but the bucket."""
    rows, at = _take(image, _header_len(len(specs)), _row_sizes(bucket))
    out = []
    for g, spec in enumerate(specs):
        paged = spec.layout is not Layout.FRESH
        b, tails = bucket.requests, bucket.tokens * bucket.tail
        sizes = (
            (b, b + 1, bucket.pages[g], b, tails, bucket.writes[g], 2 * bucket.moves[g])
            if paged
            else (0,) * 7
        )
        cache, at = _take(image, at, sizes)
        cache[-1] = cache[-1].reshape(-1, 2)
        out.append(Views(*(rows + cache)))
    return tuple(out)


def read_header(image: Ints) -> tuple[Bucket, Real]:
    """The bucket and the real counts an image was made with."""
    if len(image) < _SCALARS or image[0] != MAGIC:
        raise RuleError(
            "a plan image begins with its magic number",
            f"{image[:1].tolist()}",
            "Pass what pack() returned",
        )
    head = image[: _header_len(int(image[1]))].tolist()
    groups, b, t, width, emits, tail, real_b, real_t, real_e = head[1:_SCALARS]
    per = [tuple(head[_SCALARS + k * groups : _SCALARS + (k + 1) * groups]) for k in range(3)]
    return Bucket(b, t, width, emits, tail, *per), Real(real_b, real_t, real_e)


def _header(plan: StepPlan) -> list[int]:
    b, r = plan.bucket, plan.real
    counts = [
        MAGIC,
        len(plan.groups),
        b.requests,
        b.tokens,
        b.width,
        b.emits,
        b.tail,
        r.requests,
        r.tokens,
        r.emits,
    ]
    return [*counts, *b.pages, *b.writes, *b.moves]


def _header_len(groups: int) -> int:
    return _SCALARS + 3 * groups


def _row_sizes(bucket: Bucket) -> tuple[int, ...]:
    return (bucket.requests + 1, bucket.tokens, bucket.tokens, bucket.tokens + 1, bucket.emits)


def _take(image: Any, at: int, sizes: tuple[int, ...]) -> tuple[list[Any], int]:
    out = []
    for size in sizes:
        out.append(image[at : at + size])
        at += size
    return out, at
