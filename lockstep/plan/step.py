"""The plan: one frozen value that describes a step completely.

A step is one forward pass over a batch of (request, new rows). There are no modes: prefill, chunk,
decode, verify and draft are the same thing with other numbers. Arrays are int32 and read-only. Only
`plan.build` makes plans; `plan.bucket` pads them, `plan.check` judges them. No token ids, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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

    def of(self, g: int) -> Bucket:
        """The bucket of group g alone, as a backend sees it."""
        return replace(
            self, pages=(self.pages[g],), writes=(self.writes[g],), moves=(self.moves[g],)
        )


@dataclass(frozen=True)
class Real:
    """The counts before padding; real entries come first."""

    requests: int
    tokens: int
    emits: int


@dataclass(frozen=True, eq=False)
class PagedGroup:
    """K/V live in the cache: this step's are written, then all are read."""

    spec: GroupSpec
    # [B] keys that exist after this step's write: 1 + the largest row position (cross: the encoder
    # length)
    kv_lens: Ints
    page_indptr: Ints  # [B+1]
    # [P] entry k of a request holds positions [first_pos + k*page_size, first_pos +
    # (k+1)*page_size); then its scratch
    page_ids: Ints
    first_pos: Ints  # [B] page-aligned; positions below were dropped
    tail_slots: Ints  # [tokens*tail] the rows' lists, addressed by tail_indptr
    write_slots: Ints  # [W] slot(t, positions[t])
    # [M, 2] (from, to): K/V rows to relocate before the first write; gather all, then scatter all
    moves: Ints


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
    # [T] from this position on a row's keys are named by its list; positions[t]+1 for a plain row
    start: Ints
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
