"""The plan: one frozen value that describes a step completely.

There are no modes: prefill, chunk, decode, verify and draft differ only in their numbers. Arrays
are int32 and read-only. Only `plan.build` makes plans; `plan.bucket` pads them, `plan.check`
validates them. A plan holds no token ids. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lockstep.types import GroupSpec

Ints = NDArray[np.int32]


def ints(values: Sequence[int] | NDArray[np.integer]) -> Ints:
    return freeze(np.array(values, dtype=np.int32))


def freeze(array: NDArray[np.int32]) -> Ints:
    """Makes `array` read-only and returns it."""
    array.setflags(write=False)
    return array


def append(array: Ints, more: Sequence[int] | NDArray[np.integer]) -> Ints:
    """Returns `array` followed by `more`, read-only; `array` itself if `more` is empty."""
    if not len(more):
        return array
    return freeze(np.concatenate((array, np.asarray(more, np.int32))))


@dataclass(frozen=True)
class Bucket:
    """The padded shape of a step: the length of every array of the plan follows from it."""

    requests: int
    tokens: int
    width: int  # rows per request if uniform, else 0
    emits: int
    tail: int  # entries of a tree row's slot list, at most
    pages: tuple[int, ...]  # page table entries, per group
    writes: tuple[int, ...]  # rows written, per group: tokens or 0
    moves: tuple[int, ...]  # per group

    def of(self, g: int) -> Self:
        """The bucket of group g alone, as a backend sees it."""
        pages, writes, moves = self.pages[g], self.writes[g], self.moves[g]
        return replace(self, pages=(pages,), writes=(writes,), moves=(moves,))


class Real(NamedTuple):
    """The counts before padding; real entries come first."""

    requests: int
    tokens: int
    emits: int


@dataclass(frozen=True, eq=False)
class PagedGroup:
    """K/V live in the cache: the step writes those of its rows, then reads all."""

    spec: GroupSpec
    kv_lens: Ints  # [B] keys after this step's write: 1 + the last position (cross: the encoder's)
    page_indptr: Ints  # [B+1]
    page_ids: Ints  # [P] a request's page k begins at first_pos + k*page_size; then scratch pages
    first_pos: Ints  # [B] page-aligned; keys of lower positions were dropped
    tail_slots: Ints  # [tokens*tail] the rows' slot lists, addressed by tail_indptr
    write_slots: Ints  # [W] the slot that row t's K and V are written to
    moves: Ints  # [M, 2] (from, to): slots to relocate before the write: gather all, scatter all


@dataclass(frozen=True, eq=False)
class FreshGroup:
    """Keys are the request's own rows of this step: no write, no stale read can be expressed."""

    spec: GroupSpec


Group = PagedGroup | FreshGroup


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step. Row t of request i: q_indptr[i] <= t < q_indptr[i+1], at positions[t]."""

    q_indptr: Ints  # [B+1]
    positions: Ints  # [T]
    start: Ints  # [T] a row's slot list names its keys from here on; positions[t]+1: no list
    tail_indptr: Ints  # [T+1] where a row's slot list is in every group's tail_slots
    emit: Ints  # [S] rows whose logits are wanted; a row may occur twice
    groups: tuple[Group, ...]
    bucket: Bucket
    real: Real

    @cached_property
    def new_lens(self) -> Ints:
        """The number of rows of each request: returns int32 [B]."""
        return np.asarray(self.q_indptr[1:] - self.q_indptr[:-1])

    @cached_property
    def request(self) -> Ints:
        """The index of every row's request: returns int32 [T]."""
        return np.repeat(np.arange(self.bucket.requests, dtype=np.int32), self.new_lens)
