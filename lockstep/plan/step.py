"""The plan: one frozen value that describes a step completely.

There are no modes: prefill, chunk, decode, verify and draft are the same thing with other numbers.
Arrays are int32 and read-only. Only `plan.build` makes plans; `plan.bucket` pads them, `plan.check`
judges them. No token ids, no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lockstep.types import GroupSpec

Ints = NDArray[np.int32]


def ints(values: Sequence[int] | NDArray[np.integer]) -> Ints:
    return frozen(np.array(values, dtype=np.int32))


def frozen(array: NDArray[np.int32]) -> Ints:
    """The array itself, which nobody writes to from now on."""
    array.setflags(write=False)
    return array


def joined(array: Ints, more: Sequence[int] | NDArray[np.integer]) -> Ints:
    """The array, and behind it some more of the same."""
    if not len(more):
        return array
    return frozen(np.concatenate((array, np.asarray(more, np.int32))))


@dataclass(frozen=True)
class Bucket:
    """The padded shape of a step: the length of every array of the plan follows from it."""

    requests: int
    tokens: int
    width: int  # rows per request if uniform, else 0
    emits: int
    tail: int  # list entries per row
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
    """K/V live in the cache: this step's are written, then all are read."""

    spec: GroupSpec
    kv_lens: Ints  # [B] keys after this step's write: 1 + the last position (cross: the encoder's)
    page_indptr: Ints  # [B+1]
    page_ids: Ints  # [P] a request's k-th begins at first_pos + k*page_size; scratch pages behind
    first_pos: Ints  # [B] page-aligned; positions below were dropped
    tail_slots: Ints  # [tokens*tail] the rows' lists, addressed by tail_indptr
    write_slots: Ints  # [W] slot(t, positions[t])
    moves: Ints  # [M, 2] (from, to): rows to relocate before the write: gather all, scatter all


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
    start: Ints  # [T] from here on its list names a row's keys; positions[t]+1 for a plain row
    tail_indptr: Ints  # [T+1] the row's list in every group's tail_slots
    emit: Ints  # [S] rows whose logits are wanted; a row may stand twice
    groups: tuple[Group, ...]
    bucket: Bucket
    real: Real

    @cached_property
    def new_lens(self) -> Ints:
        """Rows of each request: returns int32 [B]."""
        return np.asarray(self.q_indptr[1:] - self.q_indptr[:-1])

    @cached_property
    def request(self) -> Ints:
        """The request of every row: returns int32 [T]."""
        return np.repeat(np.arange(self.bucket.requests, dtype=np.int32), self.new_lens)
