"""What a legal plan is. `check` runs before every step; it is the specification in executable form.

Pages are marked and gathered, not sorted: an array over the pool is written at the pages that the step writes and read back at all it
names. Slots of the step's own rows, which are few, are sorted. It knows plans and pool sizes, and nothing about who built the plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.step import Ints, PagedGroup, StepPlan
from lockstep.types import INT32_MAX, Layout, PlanError

every, some, lowest, highest = np.logical_and.reduce, np.logical_or.reduce, np.minimum.reduce, np.maximum.reduce


def check(plan: StepPlan, pool_pages: tuple[int, ...]) -> None:
    """Raises PlanError unless `plan` is legal for pools of `pool_pages` pages, one number per group (0 for a fresh one)."""
    rule(
        "there is one pool per group",
        len(pool_pages) == len(plan.groups),
        lambda: f"{len(pool_pages)} pools, {len(plan.groups)} groups",
        "Pass both",
    )
    _check_rows(plan)
    for g, group in enumerate(plan.groups):
        if isinstance(group, PagedGroup):
            _check_shape(plan, g, group)
            _check_extents(plan, group)
            _check_pages(plan, group, pool_pages[g])
        else:
            whole = every(plan.positions == np.arange(len(plan.positions)) - plan.q_indptr[:-1][plan.request])
            rule("a fresh group computes whole requests", whole, lambda: "rows that start after position 0", "Do not chunk them")


def rule(text: str, holds: bool | np.bool_, got: object, remedy: str) -> None:
    """One rule of the specification; `got` is called only when it is broken."""
    if not holds:
        raise PlanError(text, got() if callable(got) else str(got), remedy)


def _check_rows(plan: StepPlan) -> None:
    b, positions, q = plan.bucket, plan.positions, plan.q_indptr
    shape = (len(q) - 1, len(positions), len(plan.start), len(plan.tail_indptr) - 1, len(plan.emit))
    want = (b.requests, b.tokens, b.tokens, b.tokens, b.emits)
    rule(f"rows have the bucket's shape {want}", shape == want, shape, "Use plan.build and plan.pad")
    _indptr("q_indptr", q, b.tokens)
    _indptr("tail_indptr", plan.tail_indptr, None)
    real = plan.real
    rule(
        "real entries come first", q[real.requests] == real.tokens and real.emits <= b.emits, lambda: f"{real} in {b}", "Pad after the last"
    )
    rule(
        "a pad row belongs to a pad request",
        b.requests > real.requests or b.tokens == real.tokens,
        lambda: f"{real} in {b}",
        "Use Buckets.fit",
    )
    lists = plan.tail_indptr[1:] - plan.tail_indptr[:-1]
    named = positions + 1 - plan.start
    rule("a row's list names each position from start to its own", every(lists == named), lambda: _where(lists, named), "Use plan.tree")
    if len(positions):
        _check_positions(plan)
        rule("a list is at most the bucket's tail", highest(lists) <= b.tail, lambda: f"{lists.max()} > {b.tail}", "Use a wider bucket")
    if len(plan.emit):
        rule(
            "emit names rows",
            0 <= lowest(plan.emit) and highest(plan.emit) < b.tokens,
            lambda: f"{plan.emit} of {b.tokens}",
            "Count rows from 0",
        )


def _check_positions(plan: StepPlan) -> None:
    """A row stands where the lengths say: a plain one behind the one before it, the last one at the end of the keys."""
    positions = plan.positions
    rule("positions are not negative", lowest(positions) >= 0, lambda: positions.min(), "Check cached_len")
    before = np.zeros(plan.bucket.requests, np.int32)  # what row 0 of the step would stand at, were it this request's
    before[plan.filled] = plan.last + 1 - plan.q_indptr[1:][plan.filled]
    expect = before[plan.request] + np.arange(len(positions), dtype=np.int32)
    placed = (positions == expect) | (plan.start <= positions)
    rule("plain rows stand at kv_len - new_len + j", every(placed), lambda: _where(positions, expect, placed), "Use plan.build")


def _check_shape(plan: StepPlan, g: int, group: PagedGroup) -> None:
    b = plan.bucket
    shape = (
        len(group.kv_lens),
        len(group.page_indptr) - 1,
        len(group.first_pos),
        len(group.page_ids),
        len(group.tail_slots),
        len(group.write_slots),
    )
    want = (b.requests, b.requests, b.requests, b.pages[g], b.tokens * b.tail, b.writes[g])
    rule(f"group {g} has the bucket's shape {want}", shape == want, shape, "Use plan.build and plan.pad")
    rule("moves have the bucket's shape", group.moves.shape == (b.moves[g], 2), lambda: group.moves.shape, "Use plan.pad")
    writes = (0, b.tokens) if group.spec.layout is Layout.CROSS else (b.tokens,)
    rule(
        "every row is written (cross: or none)",
        len(group.write_slots) in writes,
        lambda: f"{len(group.write_slots)} of {b.tokens}",
        "Use plan.build",
    )
    _indptr(f"page_indptr of group {g}", group.page_indptr, None)
    rule(
        f"page tables fit the bucket's {b.pages[g]} entries",
        group.page_indptr[-1] <= b.pages[g],
        lambda: group.page_indptr[-1],
        "Use a larger bucket",
    )


def _check_extents(plan: StepPlan, group: PagedGroup) -> None:
    """kv_lens, positions and first_pos tell one story."""
    spec, size, kv_lens = group.spec, group.spec.page_size, group.kv_lens
    if some(group.first_pos):
        aligned = not some(group.first_pos % size) and lowest(group.first_pos) >= 0
        rule("first_pos is page-aligned and not negative", aligned, group.first_pos, "Drop whole pages")
        rule("only a window drops keys", spec.window is not None, lambda: f"first_pos {group.first_pos}", "Keep all pages")
    if spec.layout is not Layout.CROSS and len(plan.positions):
        _check_lengths(plan, group)
    held = (group.page_indptr[1:] - group.page_indptr[:-1]) * size + group.first_pos
    rule("pages cover every key", every(kv_lens <= held), lambda: _where(kv_lens, held, kv_lens <= held), "Reserve first")


def _check_lengths(plan: StepPlan, group: PagedGroup) -> None:
    """The keys end with the request's last row, and what the first row sees is still there."""
    lens, want, window = group.kv_lens[plan.filled], plan.last + 1, group.spec.window
    rule("kv_len is 1 + the request's last position", every(lens == want), lambda: _where(lens, want), "Count the new rows once")
    if window is not None:
        dropped, keep = group.first_pos[plan.filled], np.maximum(plan.first - window + 1, 0)
        rule(
            "no visible key was dropped",
            every(dropped <= keep),
            lambda: _where(dropped, keep, dropped <= keep),
            "Release by the committed length",
        )


def _check_pages(plan: StepPlan, group: PagedGroup, pool_pages: int) -> None:
    """Who may write where. Page 0, the sink, is everybody's."""
    size, used = group.spec.page_size, group.page_ids[: group.page_indptr[-1]]
    rule("a pool's slots fit in int32", pool_pages * size <= INT32_MAX, lambda: f"{pool_pages} pages of {size}", "Use a smaller pool")
    _within("page ids", used, pool_pages)
    owner, entry = _written(plan, group)
    mine = used[entry]
    mark = np.full(pool_pages, -1, np.int32)
    mark[mine] = entry
    mark[0] = -1
    alone = every((mark[mine] == entry) | (mine == 0)) and np.count_nonzero(mark.take(used) >= 0) == np.count_nonzero(mine)
    rule(
        "a page that a request writes is in no other place",
        alone,
        lambda: f"pages {used[(mark[used] >= 0) & (mark[used] != np.arange(len(used)))][:8]}",
        "Copy the page before writing",
    )
    mark[mine] = owner
    _check_writes(plan, group, mark, pool_pages)


def _written(plan: StepPlan, group: PagedGroup) -> tuple[Ints, Ints]:
    """The table entries that this step writes to, and whose they are: from the first written one on, everything is the request's own."""
    ends = group.page_indptr[1:]
    begins = np.minimum(group.page_indptr[:-1] + _first_written(plan, group), ends)
    counts = ends - begins
    owner = np.repeat(np.arange(len(ends), dtype=np.int32), counts)
    before = np.add.accumulate(counts) - counts
    return owner, (begins - before)[owner] + np.arange(len(owner), dtype=np.int32)


def _first_written(plan: StepPlan, group: PagedGroup) -> Ints:
    """[B] the first table entry that holds a position this step writes; everything behind it, scratch too, is the request's own."""
    if not len(group.write_slots):
        return np.full(plan.bucket.requests, INT32_MAX // 2, np.int32)
    begins = np.minimum(plan.q_indptr[:-1], len(plan.positions) - 1)  # a pad request without rows holds only the sink
    first: Ints = (np.minimum(plan.start[begins], plan.positions[begins]) - group.first_pos) // group.spec.page_size
    return first


def _check_writes(plan: StepPlan, group: PagedGroup, owner: NDArray[np.int32], pool_pages: int) -> None:
    """`owner[page]`: the request that may write a page, -1 if none may."""
    size, slots, total = group.spec.page_size, group.write_slots, pool_pages * group.spec.page_size
    _within("write slots", slots, total)
    _within("moves", group.moves.reshape(-1), total)
    if len(slots):
        real = slots >= size
        mine = (owner[slots // size] == plan.request) | ~real
        rule("a row writes to its own request's pages", every(mine), lambda: f"rows {np.flatnonzero(~mine)[:8]}", "Use plan.build")
        row = np.sort(slots[real])
        once = row[1:] != row[:-1]
        rule("write slots are distinct", every(once), lambda: f"slots {row[1:][~once][:8]}", "Give each row its own slot")
    if plan.tail_indptr[-1] and group.spec.layout is not Layout.CROSS:
        named = group.tail_slots[: plan.tail_indptr[-1]]
        _within("listed slots", named, total)
        lens = plan.tail_indptr[1:] - plan.tail_indptr[:-1]
        inside = owner[named // size] == np.repeat(plan.request, lens)
        rule("a row's list lies in its own request's pages", every(inside), lambda: f"slots {named[~inside][:8]}", "Use plan.tree")
        last = named[plan.tail_indptr[1:][lens > 0] - 1]
        rule("a list ends with the row's own slot", every(last == slots[lens > 0]), lambda: _where(last, slots[lens > 0]), "Use plan.tree")


def _within(what: str, ids: Ints, end: int) -> None:
    if len(ids):
        inside = highest(ids.view(np.uint32)) < end  # as an unsigned number a negative one is large
        rule(f"{what} are below the pool's {end}", inside, lambda: f"{lowest(ids)}..{highest(ids)}", "Take them from the pool")


def _indptr(name: str, array: Ints, end: int | None) -> None:
    rising = array[0] == 0 and every(array[1:] >= array[:-1]) and (end is None or array[-1] == end)
    rule(f"{name} rises from 0{'' if end is None else f' to {end}'}", rising, lambda: array[:16], "Use plan.build")


def _where(have: NDArray[Any], want: NDArray[Any], holds: NDArray[np.bool_] | None = None) -> str:
    """The first entry that breaks a rule; `holds` says which do not, for rules that are no equality."""
    bad = np.flatnonzero(have != want if holds is None else ~holds)
    at = int(bad[0]) if len(bad) else 0
    return f"{have[at]} where {want[at]} belongs (entry {at})"
