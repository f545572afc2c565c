"""Makes plans: the only place that does.

The caller says, per request, how many keys are committed, how many rows to compute, and which pages
it holds (`Work`); everything else in a plan is derived here. Called by the scheduler's loop, the
speculative worker and the lab alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.plan import address
from lockstep.plan.step import (
    Bucket,
    FreshGroup,
    Group,
    Ints,
    PagedGroup,
    Real,
    StepPlan,
    frozen,
    ints,
)
from lockstep.plan.tree import paths
from lockstep.types import INT32_MAX, GroupSpec, Layout, RuleError

NO_PAGES: Ints = ints([])
NO_MOVES: Ints = ints(np.empty((0, 2), np.int32))


class Pages(NamedTuple):
    """A request's pages in one group: page k holds positions from first_pos + k*page_size;
    `scratch` holds its tree nodes."""

    page_ids: NDArray[np.int32]  # [pages]
    first_pos: int
    scratch: NDArray[np.int32]  # [scratch pages]
    moves: NDArray[np.int32]  # [M, 2] slots to relocate before this step's write


class Work(NamedTuple):
    """One request's share of a step.

    cached_len  committed keys in the cache; the first row stands at this position
    new_len     rows computed this step
    pages       per group; None for a fresh group
    emit        rows, counted within the request, whose logits are wanted; None = the last one
    parents     None, or all nodes of the request's tree so far, of which the last new_len are this
                step's rows
    cross_len   encoder keys that exist after this step; cross_new of them (all rows, or none) are
                written by it
    """

    cached_len: int
    new_len: int
    pages: tuple[Pages | None, ...]
    emit: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None
    cross_len: int = 0
    cross_new: int = 0


class _Columns(NamedTuple):
    """The works of a step, field by field."""

    cached_lens: tuple[int, ...]
    new_lens: tuple[int, ...]
    pages: tuple[tuple[Pages | None, ...], ...]
    emits: tuple[tuple[int, ...] | None, ...]
    parents: tuple[tuple[int, ...] | None, ...]
    cross_lens: tuple[int, ...]
    cross_news: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Rows:
    """What all groups share: the rows and, for tree rows, the nodes of their lists (one entry per
    listed position)."""

    q_indptr: NDArray[np.int32]
    request: NDArray[np.int32]
    positions: NDArray[np.int32]
    start: NDArray[np.int32]
    tail_indptr: NDArray[np.int32]
    nodes: NDArray[np.int32]


def build(specs: Sequence[GroupSpec], works: Sequence[Work]) -> StepPlan:
    """The plan of one step over `works`. An empty batch is legal."""
    fresh = [spec.layout is Layout.FRESH for spec in specs]
    columns = _Columns(*zip(*works, strict=True)) if works else _Columns(*[()] * len(Work._fields))
    plain = _plain(fresh, columns)
    for work in () if plain else works:
        _check_work(fresh, work)
    rows = _rows(columns)
    groups = tuple([_group(spec, g, works, rows) for g, spec in enumerate(specs)])
    emit = rows.q_indptr[:-1] if plain else emitted(works, rows)
    real = Real(len(works), len(rows.positions), len(emit))
    return StepPlan(
        frozen(rows.q_indptr),
        frozen(rows.positions),
        frozen(rows.start),
        frozen(rows.tail_indptr),
        ints(emit),
        groups,
        exact_bucket(real, rows.q_indptr, rows.tail_indptr, groups),
        real,
    )


def indptr(lens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """[0, l0, l0+l1, ...]."""
    if isinstance(lens, np.ndarray):
        out = np.zeros(len(lens) + 1, np.int32)
        np.add.accumulate(lens, out=out[1:])
        return out
    return np.array([0, *accumulate(lens)], np.int32)


def row_positions(
    cached_lens: NDArray[np.int32], q_indptr: NDArray[np.int32], request: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Rows follow the committed keys: row j of a request stands at cached_len + j."""
    return np.asarray((cached_lens - q_indptr[:-1])[request] + np.arange(len(request)), np.int32)


def emitted(works: Sequence[Work], rows: _Rows) -> list[int]:
    """The rows whose logits are wanted, counted within the step."""
    begins = rows.q_indptr.tolist()
    return [
        begin + j
        for begin, w in zip(begins, works, strict=False)
        for j in (w.emit if w.emit is not None else (w.new_len - 1,))
    ]


def kv_lens(spec: GroupSpec, works: Sequence[Work], rows: _Rows) -> NDArray[np.int32]:
    """Keys that exist after this step's write, always."""
    if spec.layout is Layout.CROSS:
        return np.array([w.cross_len for w in works], np.int32)
    if not works:
        return np.zeros(0, np.int32)
    return np.asarray(np.maximum.reduceat(rows.positions, rows.q_indptr[:-1]) + 1, np.int32)


def live_pages(
    size: int, tables: Sequence[Ints], lens: NDArray[np.int32], first_pos: NDArray[np.int32]
) -> tuple[Sequence[Ints], list[int]]:
    """Of every request's pages those up to its kv_len, and how many they are."""
    counts, haves = (-(-lens // size) - first_pos // size).tolist(), list(map(len, tables))
    if counts == haves:
        return tables, haves
    for count, have, kv_len in zip(counts, haves, lens.tolist(), strict=True):
        if count > have:
            raise RuleError(
                "a request's pages cover its keys",
                f"{have} pages of {size} for {kv_len} keys",
                "Reserve before building",
            )
    return [table[:count] for table, count in zip(tables, counts, strict=True)], counts


def node_slots(spec: GroupSpec, pages: Pages, nodes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Slots of tree nodes: node i is the i-th token of the request's scratch."""
    zero = np.zeros(2, np.int32)
    return np.asarray(address.paged(pages.scratch, zero, zero, spec.page_size, 0, nodes), np.int32)


def write_slots(
    spec: GroupSpec, works: Sequence[Work], rows: _Rows, group: tuple[NDArray[np.int32], ...]
) -> NDArray[np.int32]:
    """slot(t, positions[t]) of every row that this group stores."""
    page_ids, page_indptr, first_pos, tail_slots = group
    if spec.layout is Layout.CROSS and not any(w.cross_new for w in works):
        return np.zeros(0, np.int32)
    if not len(rows.nodes):
        return np.asarray(
            address.paged(
                page_ids, page_indptr, first_pos, spec.page_size, rows.request, rows.positions
            ),
            np.int32,
        )
    slots = np.empty(len(rows.positions), np.int32)
    tailed = rows.positions >= rows.start
    row, p = np.flatnonzero(tailed), rows.positions[tailed]
    slots[tailed] = address.listed(tail_slots, rows.tail_indptr, rows.start, row, p)
    plain, p = rows.request[~tailed], rows.positions[~tailed]
    slots[~tailed] = address.paged(page_ids, page_indptr, first_pos, spec.page_size, plain, p)
    return slots


def tail_slots(spec: GroupSpec, g: int, works: Sequence[Work], rows: _Rows) -> NDArray[np.int32]:
    """The rows' lists in this group's slots, behind one another, filled with 0 up to the bucket's
    capacity; an encoder has no nodes."""
    capacity = len(rows.positions) * _tail(rows.tail_indptr)
    slots = np.zeros(capacity, np.int32)
    if capacity and spec.layout is not Layout.CROSS:
        for i, work in enumerate(works):
            pages = work.pages[g]
            begin, end = rows.tail_indptr[rows.q_indptr[i]], rows.tail_indptr[rows.q_indptr[i + 1]]
            if pages is not None and end > begin:
                slots[begin:end] = node_slots(spec, pages, rows.nodes[begin:end])
    return slots


def exact_bucket(
    real: Real,
    q_indptr: NDArray[np.int32],
    tail_indptr: NDArray[np.int32],
    groups: tuple[Group, ...],
) -> Bucket:
    """The shape of a plan without padding."""
    widths = q_indptr[1:] - q_indptr[:-1]
    width = int(widths[0]) if len(widths) and (widths == widths[0]).all() else 0
    sizes = [
        (len(g.page_ids), len(g.write_slots), len(g.moves))
        if isinstance(g, PagedGroup)
        else (0, 0, 0)
        for g in groups
    ]
    pages, writes, moves = zip(*sizes, strict=True) if sizes else ((), (), ())
    return Bucket(
        real.requests,
        real.tokens,
        width,
        real.emits,
        _tail(tail_indptr),
        tuple(pages),
        tuple(writes),
        tuple(moves),
    )


def _tail(tail_indptr: NDArray[np.int32]) -> int:
    return int((tail_indptr[1:] - tail_indptr[:-1]).max()) if tail_indptr[-1] else 0


def _rows(columns: _Columns) -> _Rows:
    cached_lens, new_lens = columns.cached_lens, columns.new_lens
    q_indptr = indptr(new_lens)
    request = np.repeat(np.arange(len(new_lens), dtype=np.int32), new_lens)
    positions = row_positions(np.array(cached_lens, np.int32), q_indptr, request)
    start, lens, nodes = positions + 1, np.zeros(len(positions), np.int32), []
    trees = () if columns.parents.count(None) == len(new_lens) else columns.parents
    for i, parents in enumerate(trees):
        if parents is not None:
            lists = paths(parents, new_lens[i])
            mine = slice(q_indptr[i], q_indptr[i + 1])
            lens[mine] = [len(path) for path in lists]
            start[mine] = cached_lens[i]
            positions[mine] = cached_lens[i] + lens[mine] - 1
            nodes += [node for path in lists for node in path]
    return _Rows(q_indptr, request, positions, start, indptr(lens), np.array(nodes, np.int32))


def _group(spec: GroupSpec, g: int, works: Sequence[Work], rows: _Rows) -> Group:
    if spec.layout is Layout.FRESH:
        return FreshGroup(spec)
    lens = kv_lens(spec, works, rows)
    held = [pages for w in works if (pages := w.pages[g]) is not None]
    own, firsts, scratch, moved = zip(*held, strict=True) if held else ((), (), (), ())
    first_pos = np.array(firsts, np.int32)
    tables, counts = live_pages(spec.page_size, own, lens, first_pos)
    if any(map(len, scratch)):
        tables = [np.concatenate(pair) for pair in zip(tables, scratch, strict=True)]
        counts = list(map(len, tables))
    page_ids = np.concatenate(tables) if tables else np.zeros(0, np.int32)
    page_indptr = indptr(counts)
    tails = tail_slots(spec, g, works, rows)
    writes = write_slots(spec, works, rows, (page_ids, page_indptr, first_pos, tails))
    moves = np.concatenate([NO_MOVES, *moved]) if any(map(len, moved)) else NO_MOVES
    return PagedGroup(
        spec, *map(frozen, (lens, page_indptr, page_ids, first_pos, tails, writes, moves))
    )


def _plain(fresh: list[bool], columns: _Columns) -> bool:
    """Whether these are decoding requests that `_check_work` has nothing to say about, seen at
    once: most steps are."""
    cached_lens, new_lens, pages, emits, parents, cross_lens, cross_news = columns
    if not new_lens or any(fresh):
        return False
    ones = (
        new_lens.count(1)
        == emits.count((0,))
        == parents.count(None)
        == cross_news.count(0)
        == len(new_lens)
    )
    whole = set(map(len, pages)) == {len(fresh)} and all(map(all, pages))
    return ones and whole and min(cached_lens) >= 0 and max(*cached_lens, *cross_lens) < INT32_MAX


def _check_work(fresh: list[bool], work: Work) -> None:
    """What a caller can get wrong and no later check could tell. `fresh` tells which groups have no
    cache."""
    cached_len, new_len, pages, emit, parents, cross_len, cross_new = work
    if new_len < 1 or cached_len < 0:
        rule = "a request computes at least one row after its cached keys"
        raise RuleError(rule, f"new_len={new_len}, cached_len={cached_len}", "Leave it out")
    if cached_len + new_len > INT32_MAX or cross_len > INT32_MAX:
        total = f"{cached_len} + {new_len} keys, {cross_len} encoder keys"
        raise RuleError(f"lengths fit in int32, at most {INT32_MAX}", total, "Shorten the request")
    if len(pages) != len(fresh):
        got = f"{len(pages)} for {len(fresh)} groups"
        raise RuleError(
            "a request has one entry of pages per group", got, "Use None for a fresh group"
        )
    if cross_new not in (0, new_len) or cross_new > cross_len:
        got = f"{cross_new} of {new_len} rows"
        raise RuleError(
            "an encoder is written whole, by rows of its own", got, "Encode in a step of its own"
        )
    for j in emit or ():
        if not 0 <= j < new_len:
            raise RuleError(
                "emit names rows of the request's own step",
                f"row {j} of {new_len}",
                "Count from 0 within the request",
            )
    if [entry is None for entry in pages] != fresh:
        got = f"pages={[entry is not None for entry in pages]}, cached={[not f for f in fresh]}"
        raise RuleError(
            "a cached group needs pages and a fresh one has none", got, "Reserve pages first"
        )
    if (cached_len or parents is not None) and any(fresh):
        raise RuleError(
            "a fresh group takes whole requests",
            f"cached_len={cached_len}",
            "Do not chunk an embedding or an encoder",
        )
