"""Which program does what: a step's rows cut into blocks, blocks into items, on the host and in
numpy.

A block is a run of at most `rows` flat rows (token * group + head within the group) of one request.
As parts, a block has one item per split it sees, otherwise one item. Nothing here changes a bit:
only who computes it. Called by the backend's `lower` and by the benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.order import Splits
from lockstep.types import INT32_MAX

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Rows:
    """What a step's rows see, per token, and where their requests' pages begin."""

    q_indptr: Ints  # [B+1]
    lo: Ints  # [T] a row sees positions lo <= p < hi
    hi: Ints  # [T]
    start: Ints  # [T] listed positions begin here; at or above hi for a plain row
    page_entry: Ints  # [B] entry of position 0 in page_ids, were it there


@dataclass(frozen=True, eq=False)
class Items:
    """The items of one launch. `part_rows` and `counters` are per kv head."""

    table: Ints  # [N, ITEM], see attend.py
    part_rows: int
    counters: int


def page_entries(page_indptr: Ints, first_pos: Ints, page_size: int) -> Ints:
    """So that position p of request r stands in page_ids[page_entry[r] + p // page_size]."""
    return np.asarray(page_indptr[: len(first_pos)] - first_pos // page_size, np.int32)


def blocks(
    rows: Rows, requests: NDArray[np.int64], group: int, block_rows: int
) -> tuple[NDArray[np.int64], ...]:
    """(index into `requests`, first flat row, end flat row) of every block of these requests; flat
    rows count through the whole step."""
    begin = rows.q_indptr[requests].astype(np.int64) * group
    end = rows.q_indptr[requests + 1].astype(np.int64) * group
    counts = -(-(end - begin) // block_rows)
    owner = np.repeat(np.arange(len(requests)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = begin[owner] + nth * block_rows
    return owner, first, np.minimum(first + block_rows, end[owner])


def hulls(
    rows: Rows, first: NDArray[np.int64], end: NDArray[np.int64], group: int
) -> tuple[NDArray[np.int64], ...]:
    """Per block: the positions its rows see together, [lo, hi), and the lowest listed one."""
    token_ranges = np.stack((first // group, (end - 1) // group + 1), 1).reshape(-1)
    seeing = rows.lo < rows.hi
    lo = np.where(seeing, rows.lo, INT32_MAX)
    hi = np.where(seeing, rows.hi, 0)
    tail = np.where(seeing & (rows.start < rows.hi), rows.start, INT32_MAX)

    def over(function: np.ufunc, values: NDArray[np.int32]) -> NDArray[np.int64]:
        return np.asarray(function.reduceat(np.append(values, 0), token_ranges)[::2], np.int64)

    hi = over(np.maximum, hi)
    return np.minimum(over(np.minimum, lo), hi), hi, over(np.minimum, tail)


def items(
    rows: Rows,
    requests: NDArray[np.int64],
    group: int,
    block_rows: int,
    splits: Splits,
    parts: NDArray[np.bool_],
) -> Items:
    """The items of `requests`, longest first: one per block or, where `parts` says so of a request,
    one per block and split."""
    owner, first, end = blocks(rows, requests, group, block_rows)
    if not len(first):
        return Items(np.zeros((0, 12), np.int32), 0, 0)
    lo, hi, tail = hulls(rows, first, end, group)
    cut = parts[owner]
    split = splits.index(lo)
    split_end = np.where(hi > lo, splits.index(np.maximum(hi, 1) - 1) + 1, split)
    count = np.where(cut, np.maximum(split_end - split, 1), 1)
    part_rows = np.where(cut, count * (end - first), 0)
    part_row = np.cumsum(part_rows) - part_rows
    of = np.repeat(np.arange(len(first)), count)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    begin = split[of] + nth
    split_end = np.where(cut[of], begin + 1, split_end[of])
    entry = rows.page_entry[requests[owner]][of]
    first, end, lo, hi = first[of], end[of], lo[of], hi[of]
    table = np.stack(
        (entry, first, end, lo, hi, begin, split_end, part_row[of], nth, count[of], of, tail[of]), 1
    )
    work = np.minimum(splits.begin(split_end), hi) - np.maximum(splits.begin(begin), lo)
    longest_first = np.argsort(-work, kind="stable")
    return Items(table[longest_first].astype(np.int32), int(part_rows.sum()), len(owner))
