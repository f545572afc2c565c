"""Makes plans: the only module that does.

The caller states, per request, how many keys are committed, how many rows to compute, and which
pages it has (`RequestWork`, or `BatchWork` for a batch in columns); the rest is derived here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, Self

import numpy as np
from numba import types
from numpy.typing import NDArray

from lockstep.plan import address
from lockstep.plan.check import compile_loop
from lockstep.plan.step import Bucket, FreshGroup, Ints, PagedGroup, Real, StepPlan, freeze, ints
from lockstep.types import INT32_MAX, GroupSpec, Layout, RuleError

NO_PAGES: Ints = ints([])
NO_MOVES: Ints = ints(np.empty((0, 2), np.int32))
MIN_TABLE_LEN = 16  # entries of a page table that is not empty, at least
SOME_ROW = "a request computes at least one row after its cached keys"
IN_INT32 = f"lengths fit in int32, at most {INT32_MAX}"


class RequestPages(NamedTuple):
    """A request's pages in one group: page k begins at first_pos + k*page_size."""

    page_ids: NDArray[np.int32] = NO_PAGES  # [pages]
    first_pos: int = 0
    scratch: NDArray[np.int32] = NO_PAGES  # [scratch pages]
    moves: NDArray[np.int32] = NO_MOVES  # [M, 2] slots to relocate before this step's write


class RequestWork(NamedTuple):
    """One request's share of a step."""

    cached_len: int  # committed keys in the cache; the first row is at this position
    new_len: int  # rows computed this step
    pages: tuple[RequestPages | None, ...]  # per group; None for a fresh group
    emit: tuple[int, ...] | None = None  # rows whose logits are wanted; None = the last one
    parents: tuple[int, ...] | None = None  # draft tree so far; its last new_len nodes are the rows
    cross_len: int = 0  # encoder keys that exist after this step
    cross_new: int = 0  # encoder keys that this step's rows write: new_len, or 0


class GroupTables:
    """The page tables of a batch's requests in one group."""

    def __init__(self, requests: int) -> None:
        self.first_pos = np.zeros(requests, np.int32)
        self.counts = np.zeros(requests, np.int32)  # pages per request
        self.others: dict[int, RequestPages] = {}  # of requests with scratch pages or moves
        self._ids = np.zeros((requests, 0), np.int32)

    def write(self, i: int, pages: RequestPages) -> None:
        ids, first_pos, scratch, moves = pages
        if len(ids) > self._ids.shape[1]:
            more = np.zeros((len(self._ids), 2 * len(ids) - self._ids.shape[1]), np.int32)
            self._ids = np.concatenate((self._ids, more), 1)
        self._ids[i, : len(ids)] = ids
        self.counts[i], self.first_pos[i] = len(ids), first_pos
        self.others.pop(i, None)
        if len(scratch) or len(moves):
            self.others[i] = pages

    def flatten(self, size: int, lens: Ints) -> tuple[Ints, Ints]:
        """Returns (page_ids, page_indptr): per request, the pages that cover its `lens` keys of
        `size` per page, then its scratch pages; page_ids is padded with the null page."""
        counts = (lens - self.first_pos + np.int32(size - 1)) // np.int32(size)
        if (counts > self.counts).any():
            i = int((counts > self.counts).argmax())
            got = f"{self.counts[i]} pages of {size} for {lens[i]} keys"
            raise RuleError("a request's pages cover its keys", got, "Reserve before building")
        ids = self._ids
        if self.others:
            most = max(len(pages.scratch) for pages in self.others.values())
            ids = np.concatenate((ids, np.zeros((len(ids), most), np.int32)), 1)
        for i, (_, _, scratch, _) in self.others.items():
            ids[i, counts[i] : counts[i] + len(scratch)] = scratch
            counts[i] += len(scratch)
        page_indptr = indptr(counts)
        page_ids = np.zeros(table_len(int(page_indptr[-1])), np.int32)
        compiled()(ids, page_indptr, page_ids)
        return freeze(page_ids), freeze(page_indptr)


class PageTables:
    """The page tables of a batch in all its groups; a step rewrites those that changed."""

    def __init__(self, specs: Sequence[GroupSpec], requests: int) -> None:
        self.specs, self.fresh = specs, [spec.layout is Layout.FRESH for spec in specs]
        self.groups = [GroupTables(requests) for _ in specs]
        self._known: list[tuple[RequestPages | None, ...] | None] = [None] * requests

    def update(self, pages: Sequence[tuple[RequestPages | None, ...]]) -> None:
        known = self._known
        for i in [i for i, entry in enumerate(pages) if entry is not known[i]]:
            if known[i] is None:
                self._check(pages[i])
            for tables, own in zip(self.groups, pages[i], strict=True):
                if own is not None:
                    tables.write(i, own)
            known[i] = pages[i]

    def _check(self, pages: tuple[RequestPages | None, ...]) -> None:
        missing = [own is None for own in pages]
        if missing != self.fresh:
            rule = "a request has pages in every cached group, and None in every fresh one"
            got = f"None={missing}, fresh={self.fresh}"
            raise RuleError(rule, got, "Reserve pages first, pass None for a fresh group")


@dataclass(frozen=True, eq=False)
class BatchShape:
    """The T rows of a batch's B requests: the part of a plan that steps of one batch share."""

    new_lens: Ints  # [B]
    q_indptr: Ints  # [B+1]
    request: Ints  # [T] index of the row's request
    offsets: Ints  # [T] a row's position is its request's cached_len + offset
    list_lens: Ints  # [T] entries of a tree row's slot list: its ancestors and itself; 0: no tree
    tail_indptr: Ints  # [T+1] prefix sums of list_lens
    nodes: Ints  # the lists as tree nodes, joined
    emit: Ints  # rows whose logits are wanted, counted within the step
    cross_lens: Ints  # [B]
    encodes: bool  # whether rows are written to the cross groups
    width: int  # rows per request if equal for all, else 0
    tail: int  # the longest list's length

    @classmethod
    def of(
        cls,
        new_lens: Sequence[int],
        emits: Sequence[tuple[int, ...] | None],
        parents: Sequence[tuple[int, ...] | None],
        cross_lens: Sequence[int],
        cross_news: Sequence[int],
    ) -> Self:
        """Makes a shape from columns of `RequestWork` fields, one entry per request."""
        _check_shape(zip(new_lens, emits, cross_lens, cross_news, strict=True))
        q_indptr = indptr(new_lens)
        request = np.repeat(np.arange(len(new_lens), dtype=np.int32), new_lens)
        offsets = np.arange(len(request), dtype=np.int32) - q_indptr[request]
        list_lens, nodes = np.zeros(len(request), np.int32), list[int]()
        for i in [i for i, tree in enumerate(parents) if tree is not None]:
            lists = paths(parents[i] or (), new_lens[i])
            rows = slice(q_indptr[i], q_indptr[i + 1])
            list_lens[rows] = [len(path) for path in lists]
            offsets[rows] = list_lens[rows] - 1
            nodes += [node for path in lists for node in path]
        emit = list[int]()
        for begin, n, own in zip(q_indptr.tolist(), new_lens, emits, strict=False):
            emit += [begin + row for row in ((n - 1,) if own is None else own)]
        return cls(
            new_lens=ints(new_lens),
            q_indptr=freeze(q_indptr),
            request=freeze(request),
            offsets=freeze(offsets),
            list_lens=freeze(list_lens),
            tail_indptr=freeze(indptr(list_lens)),
            nodes=ints(nodes),
            emit=ints(emit),
            cross_lens=ints(cross_lens),
            encodes=any(cross_news),
            width=new_lens[0] if len(set(new_lens)) == 1 else 0,
            tail=int(list_lens.max(initial=0)),
        )


@dataclass(frozen=True, eq=False)
class BatchWork:
    """The work of one step as columns, one entry per request."""

    shape: BatchShape
    cached_lens: Sequence[int] | NDArray[np.int64]  # [B]
    pages: Sequence[tuple[RequestPages | None, ...]]  # [B], per group
    tables: PageTables | None = None  # the batch's, as the previous step left them

    @classmethod
    def of(cls, works: Sequence[RequestWork]) -> Self:
        columns = zip(*works, strict=True) if works else ((),) * len(RequestWork._fields)
        cached_lens, new_lens, pages, *rest = columns
        return cls(BatchShape.of(new_lens, *rest), cached_lens, pages)

    def __len__(self) -> int:
        return len(self.cached_lens)


def paths(parents: Sequence[int], new_len: int) -> list[list[int]]:
    """Returns, for each of this step's rows (the last `new_len` nodes), the list of nodes it sees,
    one per position from the committed length on, itself last. Node i, a draft token, is a child of
    node parents[i] < i, or of the committed prefix (-1). Trees are addresses, not masks."""
    if not 0 < new_len <= len(parents):
        rule = "a tree step computes at least one and at most all nodes"
        raise RuleError(rule, f"{new_len} rows of {len(parents)} nodes", "Check new_len")
    lists: list[list[int]] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            rule = "a node's parent comes before it, or is -1"
            raise RuleError(rule, f"parents[{node}] = {parent}", "Order the nodes by depth")
        lists.append([*(lists[parent] if parent >= 0 else []), node])
    return lists[len(parents) - new_len :]


class Rows(NamedTuple):
    """`StepPlan.positions` and `StepPlan.start`, which all groups share."""

    positions: Ints
    start: Ints


def build(specs: Sequence[GroupSpec], works: BatchWork | Sequence[RequestWork]) -> StepPlan:
    """Returns the plan of one step over `works`. An empty batch is legal."""
    work = works if isinstance(works, BatchWork) else BatchWork.of(works)
    shape = work.shape
    cached_lens = np.asarray(work.cached_lens, np.int64)
    tables = work.tables or PageTables(specs, len(work))
    _check_lens(shape, cached_lens)
    tables.update(work.pages)
    positions = cached_lens.astype(np.int32)[shape.request] + shape.offsets
    rows = Rows(freeze(positions), freeze(positions + 1 - shape.list_lens))
    groups = [_group(g, tables, work, rows) for g in range(len(specs))]
    paged = [group if isinstance(group, PagedGroup) else None for group in groups]
    bucket = Bucket(
        requests=len(work),
        tokens=len(positions),
        width=shape.width,
        emits=len(shape.emit),
        tail=shape.tail,
        pages=tuple([len(group.page_ids) if group else 0 for group in paged]),
        writes=tuple([len(group.write_slots) if group else 0 for group in paged]),
        moves=tuple([len(group.moves) if group else 0 for group in paged]),
    )
    return _plan(shape, rows, groups, bucket)


def _plan(
    shape: BatchShape, rows: Rows, groups: Sequence[PagedGroup | FreshGroup], bucket: Bucket
) -> StepPlan:
    """Makes an unpadded plan: its bucket counts real entries alone."""
    return StepPlan(
        q_indptr=shape.q_indptr,
        positions=rows.positions,
        start=rows.start,
        tail_indptr=shape.tail_indptr,
        emit=shape.emit,
        groups=tuple(groups),
        bucket=bucket,
        real=Real(bucket.requests, bucket.tokens, bucket.emits),
    )


def slice_plan(plan: StepPlan, shape: BatchShape, skipped: Ints | int = 0) -> StepPlan:
    """Returns the plan of part of a step: per request, the rows of `shape` after `skipped` ones."""
    b, begins = plan.bucket, plan.q_indptr[:-1] + skipped
    if b.tail or any(b.moves) or b.requests != len(shape.new_lens):
        rule = "a step that is run in parts has plain rows of every request, and no moves"
        raise RuleError(rule, str(b), "Run the plan as it is")
    these = begins[shape.request] + shape.offsets
    positions = freeze(plan.positions[these])
    starts, tokens = freeze(positions + np.int32(1)), len(these)
    lens = freeze(starts[shape.q_indptr[1:] - 1])
    groups = [
        replace(group, kv_lens=lens, write_slots=freeze(group.write_slots[these]))
        for group in plan.groups
        if isinstance(group, PagedGroup)
    ]
    writes = (tokens,) * len(groups)
    bucket = replace(b, tokens=tokens, width=shape.width, emits=len(shape.emit), writes=writes)
    return _plan(shape, Rows(positions, starts), groups, bucket)


def join(ids: Any, ends: Any, out: Any) -> None:
    """Fills out[ends[i] : ends[i + 1]] with the first entries of ids[i], for every i."""
    for i in range(len(ends) - 1):
        for k in range(ends[i], ends[i + 1]):
            out[k] = ids[i, k - ends[i]]


@cache
def compiled() -> Any:
    """Returns `join` compiled, from Numba's cache or now: numpy takes ten times as long."""
    table, column = [types.Array(types.int32, dims, "C") for dims in (2, 1)]
    return compile_loop(types.void(table, column, column), join)


def table_len(pages: int) -> int:
    """Returns the padded length of a table of `pages`: few sizes, so steps keep their shape."""
    return next_power_of_2(max(pages, MIN_TABLE_LEN)) if pages else 0


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two >= n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def indptr(lens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns [0, l0, l0+l1, ...]."""
    out = np.zeros(len(lens) + 1, np.int32)
    np.add.accumulate(lens, dtype=np.int32, out=out[1:])
    return out


def kv_lens(spec: GroupSpec, work: BatchWork, rows: Rows) -> Ints:
    """Returns, per request, the number of keys that exist after this step's write."""
    shape = work.shape
    if spec.layout is Layout.CROSS or not work:
        return shape.cross_lens
    return freeze(np.maximum.reduceat(rows.positions, shape.q_indptr[:-1]) + np.int32(1))


def node_slots(spec: GroupSpec, pages: RequestPages, nodes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the slots of tree nodes: node i is token i of the request's scratch pages."""
    zero = np.zeros(2, np.int32)
    return np.asarray(address.paged(pages.scratch, zero, zero, spec.page_size, 0, nodes), np.int32)


def write_slots(
    spec: GroupSpec, work: BatchWork, rows: Rows, group: tuple[NDArray[np.int32], ...]
) -> NDArray[np.int32]:
    """Returns the slot of every row that this group stores: all rows, or none."""
    (positions, start), shape = rows, work.shape
    page_ids, page_indptr, first_pos, tail_slots = group
    if spec.layout is Layout.CROSS and not shape.encodes:
        return np.zeros(0, np.int32)
    in_pages = partial(address.paged, page_ids, page_indptr, first_pos, spec.page_size)
    if not len(shape.nodes):
        return np.asarray(in_pages(shape.request, positions), np.int32)
    slots = np.empty(len(positions), np.int32)
    tailed = positions >= start
    row, p = np.flatnonzero(tailed), positions[tailed]
    slots[tailed] = address.listed(tail_slots, shape.tail_indptr, start, row, p)
    slots[~tailed] = in_pages(shape.request[~tailed], positions[~tailed])
    return slots


def tail_slots(spec: GroupSpec, g: int, work: BatchWork, rows: Rows) -> NDArray[np.int32]:
    """Returns the rows' lists as slots of group g, padded with 0 to the bucket's capacity."""
    shape = work.shape
    slots = np.zeros(len(rows.positions) * shape.tail, np.int32)
    if len(slots) and spec.layout is not Layout.CROSS:
        begins = shape.tail_indptr[shape.q_indptr]
        for i in np.flatnonzero(begins[1:] > begins[:-1]).tolist():
            pages, nodes = work.pages[i][g], slice(begins[i], begins[i + 1])
            if pages is not None:
                slots[nodes] = node_slots(spec, pages, shape.nodes[nodes])
    return slots


def _group(g: int, all_tables: PageTables, work: BatchWork, rows: Rows) -> PagedGroup | FreshGroup:
    spec, tables = all_tables.specs[g], all_tables.groups[g]
    if spec.layout is Layout.FRESH:
        return FreshGroup(spec)
    lens = kv_lens(spec, work, rows)
    page_ids, page_indptr = tables.flatten(spec.page_size, lens)
    first_pos, tails = tables.first_pos.copy(), tail_slots(spec, g, work, rows)
    writes = write_slots(spec, work, rows, (page_ids, page_indptr, first_pos, tails))
    moves = [pages.moves for _, pages in sorted(tables.others.items())]
    return PagedGroup(
        spec=spec,
        kv_lens=lens,
        page_indptr=page_indptr,
        page_ids=page_ids,
        first_pos=freeze(first_pos),
        tail_slots=freeze(tails),
        write_slots=freeze(writes),
        moves=freeze(np.concatenate([NO_MOVES, *moves])),
    )


def _check_shape(requests: Iterable[tuple[int, tuple[int, ...] | None, int, int]]) -> None:
    """Raises for mistakes of a caller that no later check could detect."""
    for new_len, emit, cross_len, new in requests:
        if new_len < 1:
            raise RuleError(SOME_ROW, f"new_len={new_len}", "Leave the request out")
        if new_len > INT32_MAX or cross_len > INT32_MAX:
            raise RuleError(IN_INT32, f"{new_len} rows, {cross_len} encoder keys", "Shorten it")
        if new not in (0, new_len) or new > cross_len:
            rule = "an encode step writes all encoder keys, one per row"
            raise RuleError(rule, f"{new} of {new_len} rows", "Encode in a step of its own")
        if emit and not 0 <= min(emit) <= max(emit) < new_len:
            rule = "emit has row numbers within the request's part of the step"
            row = next(row for row in emit if not 0 <= row < new_len)
            raise RuleError(rule, f"row {row} of {new_len}", "Count from 0 within the request")


def _check_lens(shape: BatchShape, cached_lens: NDArray[np.int64]) -> None:
    least = int(cached_lens.min(initial=0))
    if least < 0:
        raise RuleError(SOME_ROW, f"cached_len={least}", "Leave the request out")
    most = int((cached_lens + shape.new_lens).max(initial=0))
    if most > INT32_MAX:
        raise RuleError(IN_INT32, f"{most} keys and new rows", "Shorten the request")
