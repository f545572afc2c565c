"""Padding is data: ordinary requests, whose only page is page 0, give a plan its bucket's shape.

A pad request has token 0 at positions 0...n-1, and page 0 (the null page) for each of its pages; it
reads only what this step wrote. No kernel tests whether a row is real."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from lockstep.plan.build import NO_PAGES, indptr, next_power_of_2
from lockstep.plan.step import Bucket, Group, Ints, PagedGroup, StepPlan, append, ints
from lockstep.types import RuleError

DECODING = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)  # requests of a recorded step
RECORDED_ROWS = 16  # most rows per request of a recorded step: with more it is a prefill


@dataclass(frozen=True)
class Buckets:
    """The shapes a runner may use. Rows, requests and emits are rounded up to a grid of sizes each
    (by default that of the rows), emits above it to multiples of its last size; page tables, lists
    and moves to powers of two."""

    tokens: tuple[int, ...]
    requests: tuple[int, ...] | None = None
    emits: tuple[int, ...] | None = None
    # if not empty, the only rows per request with which steps are padded: decode, draft, verify
    widths: tuple[int, ...] = ()
    request_pages: int = 0  # least page table room per request: growing tables keep their bucket
    most_pages: int = 0  # bound of this room for all requests together

    @classmethod
    def for_decoding(
        cls, most: int, request_pages: int, most_pages: int, widths: tuple[int, ...] = (1,)
    ) -> Self:
        """Makes buckets for decoding up to `most` requests: few sizes, each worth a graph."""
        end = next((n for n in DECODING if n >= most), -(-most // DECODING[-1]) * DECODING[-1])
        sizes = (*(n for n in DECODING if n < most), end)
        return cls(sizes, widths=widths, request_pages=request_pages, most_pages=most_pages)

    def fit(self, plan: StepPlan) -> Bucket:
        """Returns the smallest bucket for `plan`, with a pad request if there is a pad row."""
        real, exact = plan.real, plan.bucket
        alike = exact.width in (self.widths or (1,)) or real.requests > 1
        width = exact.width if alike else 0
        requests = self._round(real.requests, "requests") if width else 0
        tokens = requests * width  # decode and verify: `width` rows per request, pad ones included
        if not width or (tokens > self.tokens[-1] and width not in self.widths):
            width = 0
            tokens = self._round(real.tokens, "tokens")
            requests = self._round(real.requests + (tokens > real.tokens), "requests")
        every = width in self.widths and real.emits == real.tokens  # verify: every row emits
        pads = pad_lens(tokens - real.tokens, requests - real.requests)
        pages = [0] * len(plan.groups)
        for g, group in enumerate(plan.groups):
            if isinstance(group, PagedGroup):
                held = int(group.page_indptr[-1] + np.sum(-(-pads // group.spec.page_size)))
                room = min(requests * self.request_pages, self.most_pages)
                pages[g] = next_power_of_2(max(held, room, len(group.page_ids)))
        return Bucket(
            requests=requests,
            tokens=tokens,
            width=width,
            emits=tokens if every else self._round(real.emits, "emits"),
            tail=next_power_of_2(exact.tail),
            pages=tuple(pages),
            writes=tuple(tokens if n else 0 for n in exact.writes),
            moves=tuple(map(next_power_of_2, exact.moves)),
        )

    def grid(self, what: str) -> tuple[int, ...]:
        grid: tuple[int, ...] | None = getattr(self, what)
        return grid or self.tokens

    def _round(self, n: int, what: str) -> int:
        grid = self.grid(what)
        largest = grid[-1]
        if n <= largest:
            return grid[bisect_left(grid, n)] if n else 0
        if what == "emits":
            return -(-n // largest) * largest
        rule = f"a step has at most {largest} {what}"
        raise RuleError(rule, str(n), "Schedule less, or allow a larger bucket")


def pad_lens(tokens: int, requests: int) -> Ints:
    """Returns the rows of each pad request: `tokens` spread evenly over `requests`."""
    return ints([tokens // requests + (i < tokens % requests) for i in range(requests)])


def pad(plan: StepPlan, bucket: Bucket) -> StepPlan:
    """Returns `plan` in the shape of `bucket`. The real entries stay first and unchanged."""
    real, have = plan.real, plan.bucket
    for name in ("requests", "tokens", "emits", "tail", "pages", "writes", "moves"):
        need, room = getattr(have, name), getattr(bucket, name)
        if np.greater(need, room).any():
            raise RuleError(f"a plan has at most {room} {name}", str(need), "Use a larger bucket")
    pads = pad_lens(bucket.tokens - real.tokens, bucket.requests - real.requests)
    positions = np.concatenate([NO_PAGES, *(np.arange(n, dtype=np.int32) for n in pads)])
    groups = [
        pad_group(group, g, bucket, pads, positions) if isinstance(group, PagedGroup) else group
        for g, group in enumerate(plan.groups)
    ]
    return replace(
        plan,
        q_indptr=append(plan.q_indptr, plan.q_indptr[-1] + indptr(pads)[1:]),
        positions=append(plan.positions, positions),
        start=append(plan.start, positions + 1),
        tail_indptr=append(plan.tail_indptr, np.full(len(positions), plan.tail_indptr[-1])),
        emit=_fill(plan.emit, bucket.emits),
        groups=tuple(groups),
        bucket=bucket,
    )


def pad_group(group: PagedGroup, g: int, bucket: Bucket, pads: Ints, positions: Ints) -> Group:
    """Adds the pad requests to one group: page 0 as often as their rows need, nothing else."""
    size = group.spec.page_size
    counts = -(-pads // size)
    return replace(
        group,
        kv_lens=append(group.kv_lens, pads if group.spec.causal else np.minimum(pads, 1)),
        page_indptr=append(group.page_indptr, group.page_indptr[-1] + indptr(counts)[1:]),
        page_ids=_fill(group.page_ids, bucket.pages[g]),
        first_pos=_fill(group.first_pos, bucket.requests),
        tail_slots=_fill(group.tail_slots, bucket.tokens * bucket.tail),
        write_slots=append(group.write_slots, positions % size if bucket.writes[g] else []),
        moves=_fill(group.moves, bucket.moves[g]),
    )


def _fill(array: Ints, size: int) -> Ints:
    return append(array, np.zeros((size - len(array), *array.shape[1:]), np.int32))
