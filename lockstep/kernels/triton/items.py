"""Divides the work of a step among programs: rows into blocks of at most `block_rows` flat rows
(token * group + head within the group) of one request, and blocks into items, one per split or one
for all splits. Runs on the host; changes no bit."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from lockstep.order import Splits
from lockstep.plan.check import compile_loop
from lockstep.types import INT32_MAX

ITEM = 12  # int32 per item: page entry, flat rows [begin, end), positions [lo, hi) that they see,
# splits [begin, end), first scratch row of its block's parts, index and count of parts, index of
# its block, first listed position
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Rows(NamedTuple):
    """What each token of a step sees, and where each request's pages begin."""

    q_indptr: Ints  # [B+1]
    lo: Ints  # [T] a row sees positions lo <= p < hi
    hi: Ints  # [T]
    start: Ints  # [T] listed positions begin here; at or above hi for a plain row
    page_entry: Ints  # [B] index in page_ids that position 0 has, or would have if still there


def items(
    rows: Rows, requests: Longs, group: int, block_rows: int, splits: Splits, parts: Flags
) -> tuple[Ints, int, int]:
    """Returns the items [N, ITEM] of `requests`, longest first: one per block or, where `parts` is
    set, one per block and split; then the scratch rows of parts and the blocks, per kv head."""
    count = int(splits.index(int(rows.hi.max(initial=0)))) + 2
    edges = begins(splits, count)
    lens = (rows.q_indptr[requests + 1] - rows.q_indptr[requests]) * group
    most = int((-(-lens // block_rows) * np.where(parts, count, 1)).sum())
    table, work = np.empty((most, ITEM), np.int32), np.empty(most, np.int64)
    how = (requests, parts, edges, group, block_rows)
    made, part_rows, blocks = compiled()(tuple(rows), *how, table, work)
    return table[np.argsort(-work[:made], kind="stable")], part_rows, blocks


@cache
def begins(splits: Splits, count: int) -> Longs:
    """Returns the first positions of splits 0 to count - 1."""
    return np.asarray(splits.begin(np.arange(count)), np.int64)


@cache
def compiled() -> Any:
    """Returns `cut`, compiled or from Numba's cache: numpy takes a hundred calls for few rows."""
    n, ints = types.int64, types.Array(types.int32, 1, "C", readonly=True)
    longs, flags = [types.Array(kind, 1, "C", readonly=True) for kind in (n, types.boolean)]
    table, work = types.Array(types.int32, 2, "C"), types.Array(n, 1, "C")
    found, rows = types.UniTuple(n, 3), types.UniTuple(ints, 5)  # type: ignore[no-untyped-call]
    return compile_loop(found(rows, longs, flags, longs, n, n, table, work), cut)


def cut(
    rows: Any, requests: Any, parts: Any, edges: Any, group: int, size: int, table: Any, work: Any
) -> Any:
    """Fills `table` with the items of blocks of at most `size` rows, and `work` with the positions
    of each; `edges`: first positions of all splits. Returns numbers of items, part rows, blocks."""
    q_indptr, lo, hi, start, page_entry = rows
    made = part_rows = blocks = 0
    for k in range(len(requests)):
        r = requests[k]
        first, end_all = q_indptr[r] * group, q_indptr[r + 1] * group
        while first < end_all:
            end = min(first + size, end_all)
            low, high, tail = INT32_MAX, 0, INT32_MAX
            for t in range(first // group, (end - 1) // group + 1):
                if lo[t] < hi[t]:
                    low, high = min(low, lo[t]), max(high, hi[t])
                    if start[t] < hi[t]:
                        tail = min(tail, start[t])
            low = min(low, high)
            split, all_splits = np.searchsorted(edges, low, "right") - 1, 0
            if high > low:
                all_splits = int(np.searchsorted(edges, high - 1, "right") - split)
            count, splits, rows_of_parts = 1, all_splits, 0
            if parts[k]:
                count, splits = max(all_splits, 1), 1
                rows_of_parts = count * (end - first)
            for nth in range(count):
                begin, to = split + nth, split + nth + splits
                row = table[made]
                row[0], row[1], row[2], row[3], row[4] = page_entry[r], first, end, low, high
                row[5], row[6], row[7], row[8], row[9] = begin, to, part_rows, nth, count
                row[10], row[11] = blocks, tail
                work[made] = min(edges[to], high) - max(edges[begin], low)
                made += 1
            part_rows += rows_of_parts
            blocks += 1
            first = end
    return made, part_rows, blocks
