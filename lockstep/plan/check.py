"""What a legal plan is. `check` runs before every step; it is the specification in executable form.

Mark and gather, no sort: a scratch array over the pool is written at the pages (slots) in question and read back, so the cost follows
the plan and not the pool. It knows plans and pool sizes, and nothing about who built the plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.step import Ints, PagedGroup, StepPlan
from lockstep.types import INT32_MAX, Layout, PlanError


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
            grown = int(plan.positions[0]) if len(plan.positions) else 0
            whole = grown == 0 and np.array_equal(plan.positions, np.arange(len(plan.positions)) - plan.q_indptr[:-1][plan.request])
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
    rule("a row's list names each position from start to its own", (lists == named).all(), lambda: _where(lists, named), "Use plan.tree")
    if len(positions):
        rule("positions are not negative", positions.min() >= 0, lambda: positions.min(), "Check cached_len")
        rule("a list is at most the bucket's tail", lists.max() <= b.tail, lambda: f"{lists.max()} > {b.tail}", "Use a wider bucket")
    if len(plan.emit):
        rule(
            "emit names rows",
            0 <= plan.emit.min() and plan.emit.max() < b.tokens,
            lambda: f"{plan.emit} of {b.tokens}",
            "Count rows from 0",
        )


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
    size, real = group.spec.page_size, plan.real.requests
    held = (group.page_indptr[1:] - group.page_indptr[:-1]) * size + group.first_pos
    some = plan.new_lens > 0
    first, last = _ends(plan, some)
    rule(
        "first_pos is page-aligned and not negative",
        not (group.first_pos % size).any() and (group.first_pos >= 0).all(),
        group.first_pos,
        "Drop whole pages",
    )
    if group.spec.layout is Layout.CROSS:
        rule("pages cover the encoder", (group.kv_lens <= held).all(), lambda: _where(group.kv_lens, held), "Reserve first")
        return
    lens = group.kv_lens[some]
    rule("kv_len is 1 + the request's last position", (lens == last + 1).all(), lambda: _where(lens, last + 1), "Count the new rows once")
    plain = plan.start > plan.positions
    expect = (group.kv_lens - plan.q_indptr[1:])[plan.request] + np.arange(len(plan.positions), dtype=np.int32)
    off = plain & (plan.positions != expect)
    rule("plain rows stand at kv_len - new_len + j", not off.any(), lambda: _where(plan.positions, expect), "Use plan.build")
    rule("pages cover every key", (group.kv_lens <= held).all(), lambda: _where(group.kv_lens, held), "Reserve first")
    keep = np.maximum(first - (group.spec.window or INT32_MAX) + 1, 0) if group.spec.window else np.zeros_like(first)
    rule(
        "no visible key was dropped",
        (group.first_pos[some] <= keep).all(),
        lambda: _where(group.first_pos[some], keep),
        "Release by the committed length",
    )
    rule("pads come from position 0", not group.first_pos[real:].any(), lambda: group.first_pos[real:], "Use plan.pad")


def _check_pages(plan: StepPlan, group: PagedGroup, pool_pages: int) -> None:
    """Who may write where. Page 0, the sink, is everybody's."""
    size, used = group.spec.page_size, group.page_ids[: group.page_indptr[-1]]
    rule("a pool's slots fit in int32", pool_pages * size <= INT32_MAX, lambda: f"{pool_pages} pages of {size}", "Use a smaller pool")
    if len(used):
        rule(
            f"page ids are below the pool's {pool_pages}",
            0 <= used.min() and used.max() < pool_pages,
            lambda: f"{used.min()}..{used.max()}",
            "Take them from the pool",
        )
    owner = np.repeat(np.arange(plan.bucket.requests, dtype=np.int32), group.page_indptr[1:] - group.page_indptr[:-1])
    entry = np.arange(len(used), dtype=np.int32)
    own = (entry - group.page_indptr[:-1][owner] >= _first_written(plan, group)[owner]) & (used > 0)
    mark = np.empty(pool_pages, np.int32)
    mark[used] = -1
    mark[used[own]] = entry[own]
    alone = (mark[used] == np.where(own, entry, -1)) | (used == 0)
    rule(
        "a page that a request writes is in no other place",
        alone.all(),
        lambda: f"pages {np.unique(used[~alone])[:8]}",
        "Copy the page before writing",
    )
    belongs = np.full(1, -1, np.int32) if not len(used) else mark
    belongs[used[own]] = owner[own]
    _check_writes(plan, group, belongs, pool_pages)


def _first_written(plan: StepPlan, group: PagedGroup) -> Ints:
    """[B] the first table entry that holds a position this step writes; everything behind it, scratch too, is the request's own."""
    if not len(group.write_slots):
        return np.full(plan.bucket.requests, INT32_MAX, np.int32)
    begin = np.zeros(plan.bucket.requests, np.int32)
    some = plan.new_lens > 0
    begin[some] = plan.start[plan.q_indptr[:-1][some]]
    first = np.zeros(plan.bucket.requests, np.int32)
    first[some] = np.minimum(begin[some], plan.positions[plan.q_indptr[:-1][some]])
    out: Ints = (first - group.first_pos) // group.spec.page_size
    return out


def _check_writes(plan: StepPlan, group: PagedGroup, belongs: NDArray[np.int32], pool_pages: int) -> None:
    """`belongs[page]`: the request that owns a page of this plan, for pages in use."""
    size, slots, total = group.spec.page_size, group.write_slots, pool_pages * group.spec.page_size
    named = group.tail_slots[: 0 if group.spec.layout is Layout.CROSS else plan.tail_indptr[-1]]
    for what, some in (("write slots", slots), ("listed slots", named), ("moves", group.moves)):
        if some.size:
            rule(
                f"{what} lie in the pool's {total}",
                0 <= some.min() and some.max() < total,
                lambda s=some: f"{s.min()}..{s.max()}",
                "Use plan.build",
            )
    if len(slots):
        mine = (belongs[slots // size] == plan.request) | (slots < size)
        rule("a row writes to its own request's pages", mine.all(), lambda: f"rows {np.flatnonzero(~mine)[:8]}", "Use plan.build")
        mark, row = np.empty(total, np.int32), np.arange(len(slots), dtype=np.int32)
        mark[slots] = row
        once = (mark[slots] == row) | (slots < size)
        rule("write slots are distinct", once.all(), lambda: f"slots {slots[~once][:8]}", "Give each row its own slot")
    if len(named):
        request = np.repeat(plan.request, plan.tail_indptr[1:] - plan.tail_indptr[:-1])
        mine = belongs[named // size] == request
        rule("a row's list lies in its own request's pages", mine.all(), lambda: f"slots {named[~mine][:8]}", "Use plan.tree")
        tailed = plan.tail_indptr[1:] > plan.tail_indptr[:-1]
        last = named[plan.tail_indptr[1:][tailed] - 1]
        rule("a list ends with the row's own slot", (last == slots[tailed]).all(), lambda: _where(last, slots[tailed]), "Use plan.tree")


def _ends(plan: StepPlan, some: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Smallest and largest position of every request that has rows."""
    if not some.any():
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    begins = plan.q_indptr[:-1][some]
    return np.minimum.reduceat(plan.positions, begins), np.maximum.reduceat(plan.positions, begins)


def _indptr(name: str, array: Ints, end: int | None) -> None:
    rising = array[0] == 0 and (array[1:] >= array[:-1]).all() and (end is None or array[-1] == end)
    rule(f"{name} rises from 0{'' if end is None else f' to {end}'}", rising, lambda: array[:16], "Use plan.build")


def _where(have: NDArray[Any], want: NDArray[Any]) -> str:
    at = int(np.flatnonzero(have != want)[0]) if (have != want).any() else 0
    return f"{have[at]} where {want[at]} belongs (entry {at})"
