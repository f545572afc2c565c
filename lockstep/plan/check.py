"""What a legal plan is. `check` runs before every step; it is the specification in executable form.

Shapes are compared in Python; entries are checked by loops that Numba compiles, each of which
returns (rule, have, want, at): the number of the first broken rule (0: none), the value found, the
value expected, and the entry's index. `TEXTS` has the messages. An index is used only after it was
found to be inside its array. Knows plans and pool sizes, and not how a plan was built."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from lockstep.plan.step import PagedGroup, StepPlan
from lockstep.types import INT32_MAX, Layout, PlanError

_WHERE = "{have} where {want} belongs"
_OWNER = "request {want}, slot {have}"
TEXTS = (
    ("", "", ""),
    ("q_indptr rises from 0 to {want}", "{have}", "Use plan.build"),
    ("tail_indptr rises from 0", "{have}", "Use plan.build"),
    ("real entries come first", _WHERE, "Pad after the last"),
    ("positions are not negative", "{have}", "Check cached_len"),
    ("a row's slot list covers the positions from start to its own", _WHERE, "Use plan.build"),
    ("a slot list fits the bucket's tail", "{have} entries for {want}", "Use a larger bucket"),
    ("row j of a request without a tree is at kv_len - new_len + j", _WHERE, "Use plan.build"),
    ("emit has row numbers below {want}", "{have}", "Count rows from 0"),
    ("page_indptr rises from 0", "{have}", "Use plan.build"),
    ("page tables fit the bucket's {want} entries", "{have}", "Use a larger bucket"),
    ("first_pos is page-aligned and not negative", "{have}, pages of {want}", "Drop whole pages"),
    ("only a window drops keys", "first_pos {have}", "Keep all pages"),
    ("kv_len is 1 + the request's last position", _WHERE, "Count the new rows once"),
    ("no visible key was dropped", _WHERE, "Release by the committed length"),
    ("pages cover every key", "{have} keys, room for {want}", "Reserve first"),
    ("page ids are below the pool's {want}", "{have}", "Take them from the pool"),
    ("a page that is written is in one page table, once", "page {have}", "Copy it before writing"),
    ("write slots are below the pool's {want}", "{have}", "Take them from the pool"),
    ("a row writes to its own request's pages", _OWNER, "Use plan.build"),
    ("write slots are distinct", "slot {have}", "Give each row its own slot"),
    ("moves are below the pool's {want}", "{have}", "Take them from the pool"),
    ("listed slots are below the pool's {want}", "{have}", "Take them from the pool"),
    ("a row's slot list uses its own request's pages", _OWNER, "Use plan.build"),
    ("a slot list ends with the row's own slot", _WHERE, "Use plan.build"),
)
(
    FINE, Q_RISES, TAILS_RISE, REAL_FIRST, NOT_NEGATIVE, LISTED, SHORT_LISTS, PLAIN_ROWS, EMITTED,
    PAGES_RISE, PAGES_FIT, ALIGNED, DROPS, KV_LEN, VISIBLE, COVERED, PAGE_IDS, ALONE, SLOTS,
    OWN_PAGES, DISTINCT, MOVES, LIST_SLOTS, LIST_PAGES, LIST_END,
) = range(len(TEXTS))  # fmt: skip


def check(plan: StepPlan, pool_pages: tuple[int, ...]) -> None:
    """Raises PlanError unless `plan` is legal for pools of these sizes (0 for a fresh group)."""
    if len(pool_pages) != len(plan.groups):
        got = f"{len(pool_pages)} pools, {len(plan.groups)} groups"
        raise PlanError("each group has one pool", got, "Pass a size per group, 0 for a fresh one")
    _check_rows(plan)
    for g, group in enumerate(plan.groups):
        if isinstance(group, PagedGroup):
            _check_group(plan, g, group, pool_pages[g])
            continue
        offsets = np.arange(len(plan.positions)) - plan.q_indptr[:-1][plan.request]
        if not (plan.positions == offsets).all():
            rule, got = "a fresh group computes whole requests", "rows that start after position 0"
            raise PlanError(rule, got, "Do not chunk an embedding or an encoder")


def _check_rows(plan: StepPlan) -> None:
    b, real = plan.bucket, plan.real
    rows = (plan.q_indptr, plan.positions, plan.start, plan.tail_indptr, plan.emit)
    shape = (b.requests + 1, b.tokens, b.tokens, b.tokens + 1, b.emits)
    _shape("rows have", tuple(map(len, rows)), shape)
    if not 0 <= real.requests <= b.requests or real.emits > b.emits:
        raise PlanError("real entries come first", f"{real} in {b}", "Pad after the last")
    if b.requests == real.requests and b.tokens != real.tokens:
        raise PlanError("a pad row belongs to a pad request", f"{real} in {b}", "Use Buckets.fit")
    judge_rows, _ = compiled()
    _judge(judge_rows(rows[:4], plan.emit, real.requests, real.tokens, b.tail), "rows")


def _check_group(plan: StepPlan, g: int, group: PagedGroup, pool_pages: int) -> None:
    b, size, cross = plan.bucket, group.spec.page_size, group.spec.layout is Layout.CROSS
    pages = (group.kv_lens, group.page_indptr, group.page_ids, group.first_pos)
    arrays = (*pages, group.tail_slots, group.write_slots)
    shape = (b.requests, b.requests + 1, b.pages[g], b.requests, b.tokens * b.tail, b.writes[g])
    _shape(f"group {g} has", (*map(len, arrays), *group.moves.shape), (*shape, b.moves[g], 2))
    if b.writes[g] != b.tokens and not (cross and b.writes[g] == 0):
        got = f"{b.writes[g]} of {b.tokens}"
        raise PlanError("every row is written, or none of a cross group", got, "Use plan.build")
    if pool_pages * size > INT32_MAX:
        raise PlanError("slots fit in int32", f"{pool_pages} pages of {size}", "Use a smaller pool")
    rows = (plan.q_indptr, plan.positions, plan.start, plan.tail_indptr)
    limits = (size, group.spec.window or 0, cross, pool_pages)
    _, judge_group = compiled()
    _judge(judge_group(rows, arrays, group.moves, *limits), f"group {g}")


def _shape(what: str, have: tuple[int, ...], want: tuple[int, ...]) -> None:
    if have != want:
        raise PlanError(f"{what} the bucket's shape {want}", str(have), "Use build and pad")


def _judge(found: tuple[int, int, int, int], where: str) -> None:
    rule, have, want, at = found
    if rule:
        text, got, remedy = TEXTS[rule]
        values = f"{got.format(have=have, want=want)} ({where}, entry {at})"
        raise PlanError(text.format(want=want), values, remedy)


@cache
def compiled() -> tuple[Any, Any]:
    """Returns `judge_rows` and `judge_group` compiled, from Numba's cache or now."""
    n, many = types.int64, types.UniTuple
    ints, pairs = [types.Array(types.int32, dims, "C", readonly=True) for dims in (1, 2)]
    found, rows, lists = many(n, 4), many(ints, 4), many(ints, 6)  # type: ignore[no-untyped-call]
    group = found(rows, lists, pairs, n, n, types.boolean, n)
    return compile_loop(found(rows, ints, n, n, n), judge_rows), compile_loop(group, judge_group)


def compile_loop(signature: Any, text: Callable[..., Any]) -> Any:
    """Compiles `text`, a loop over a plan's entries, and caches it on disk where possible."""
    try:
        return njit(signature, cache=True)(text)
    except RuntimeError:  # there is no writable place for the cache
        return njit(signature)(text)


def judge_rows(rows: Any, emit: Any, real_requests: int, real_tokens: int, tail: int) -> Any:
    """Checks what all groups share. The arrays' lengths must agree, and real_requests < len(q)."""
    q, positions, start, tails = rows
    count = len(positions)
    bad = first_fall(q)
    if bad >= 0 or q[-1] != count:
        return Q_RISES, q[bad], count, bad
    bad = first_fall(tails)
    if bad >= 0:
        return TAILS_RISE, tails[bad], 0, bad
    if q[real_requests] != real_tokens:
        return REAL_FIRST, q[real_requests], real_tokens, real_requests
    for t in range(count):
        listed = tails[t + 1] - tails[t]
        if positions[t] < 0:
            return NOT_NEGATIVE, positions[t], 0, t
        if listed != positions[t] + 1 - start[t]:
            return LISTED, listed, positions[t] + 1 - start[t], t
        if listed > tail:
            return SHORT_LISTS, listed, tail, t
    for i in range(len(q) - 1):
        last = position_range(rows, i)[1]
        for t in range(q[i], q[i + 1]):
            if start[t] > positions[t] and positions[t] != last + 1 - q[i + 1] + t:
                return PLAIN_ROWS, positions[t], last + 1 - q[i + 1] + t, t
    for s in range(len(emit)):
        if not 0 <= emit[s] < count:
            return EMITTED, emit[s], count, s
    return FINE, 0, 0, 0


def judge_group(
    rows: Any, arrays: Any, moves: Any, size: int, window: int, cross: bool, pool_pages: int
) -> Any:
    """Checks one group, after `judge_rows` has passed. `window` is 0 if there is none."""
    kv_lens, indptr, pages, first_pos, _, slots = arrays
    bad = first_fall(indptr)
    if bad >= 0:
        return PAGES_RISE, indptr[bad], 0, bad
    if indptr[-1] > len(pages):
        return PAGES_FIT, indptr[-1], len(pages), len(indptr) - 1
    for i in range(len(rows[0]) - 1):
        first, last = position_range(rows, i)
        room = first_pos[i] + (indptr[i + 1] - indptr[i]) * size
        if first_pos[i] < 0 or first_pos[i] % size:
            return ALIGNED, first_pos[i], size, i
        if first_pos[i] and not window:
            return DROPS, first_pos[i], 0, i
        if last >= 0 and not cross and kv_lens[i] != last + 1:
            return KV_LEN, kv_lens[i], last + 1, i
        if last >= 0 and not cross and window and first_pos[i] > max(0, first - window + 1):
            return VISIBLE, first_pos[i], max(0, first - window + 1), i
        if kv_lens[i] > room:
            return COVERED, kv_lens[i], room, i
    for k in range(indptr[-1]):
        if not 0 <= pages[k] < pool_pages:
            return PAGE_IDS, pages[k], pool_pages, k
    owner = np.full(pool_pages, -1, np.int32)  # the request that may write a page
    if len(slots):
        k = assign_owners(rows, arrays, size, owner)
        if k >= 0:
            return ALONE, pages[k], 0, k
    return judge_writes(rows, arrays, moves, size, cross, owner)


@njit
def judge_writes(rows: Any, arrays: Any, moves: Any, size: int, cross: bool, owner: Any) -> Any:
    """Checks write slots, moves and slot lists. Any request may write to the null page."""
    (q, _, _, tails), (tail_slots, slots) = rows, arrays[4:]
    total, row = len(owner) * size, 0
    taken = np.zeros(total // 8 + 1, np.uint8)  # one bit per slot
    for t in range(len(slots)):
        slot = slots[t]
        while q[row + 1] <= t:
            row += 1
        if not 0 <= slot < total:
            return SLOTS, slot, total, t
        if slot >= size:
            if owner[slot // size] != row:
                return OWN_PAGES, slot, row, t
            if taken[slot >> 3] >> (slot & 7) & 1:
                return DISTINCT, slot, 0, t
            taken[slot >> 3] |= 1 << (slot & 7)
    for m in range(len(moves)):
        for slot in moves[m]:
            if not 0 <= slot < total:
                return MOVES, slot, total, m
    for i in range(len(q) - 1 if not cross else 0):
        for t in range(q[i], q[i + 1]):
            for k in range(tails[t], tails[t + 1]):
                slot = tail_slots[k]
                if not 0 <= slot < total:
                    return LIST_SLOTS, slot, total, k
                if owner[slot // size] != i:
                    return LIST_PAGES, slot, i, k
            if tails[t + 1] > tails[t] and tail_slots[tails[t + 1] - 1] != slots[t]:
                return LIST_END, tail_slots[tails[t + 1] - 1], slots[t], t
    return FINE, 0, 0, 0


@njit
def first_fall(indptr: Any) -> int:
    """Returns the first index at which `indptr` falls, 0 if it does not begin with 0, else -1."""
    if indptr[0] != 0:
        return 0
    for i in range(1, len(indptr)):
        if indptr[i] < indptr[i - 1]:
            return i
    return -1


@njit
def position_range(rows: Any, i: int) -> tuple[int, int]:
    """Returns the least and the largest position of request i's rows; (0, -1) if it has none."""
    q, positions, first, last = rows[0], rows[1], 0, -1
    for t in range(q[i], q[i + 1]):
        first = min(first, positions[t]) if last >= 0 else positions[t]
        last = max(last, positions[t])
    return first, last


@njit
def assign_owners(rows: Any, arrays: Any, size: int, owner: Any) -> int:
    """Sets the `owner` of pages a request may write; returns the index of a shared one, or -1."""
    (q, positions, start, _), (_, indptr, pages, first_pos, _, _) = rows, arrays
    first = np.empty(len(q) - 1, np.int64)
    for i in range(len(q) - 1):
        first[i] = indptr[i + 1]
        if q[i] < q[i + 1]:
            begins = min(start[q[i]], positions[q[i]])
            first[i] = min(indptr[i + 1], indptr[i] + max(0, begins - first_pos[i]) // size)
        for k in range(first[i], indptr[i + 1]):
            if pages[k] and owner[pages[k]] >= 0:
                return k
            if pages[k]:
                owner[pages[k]] = i
    for i in range(len(q) - 1):
        for k in range(indptr[i], first[i]):
            if owner[pages[k]] >= 0:
                return k
    return -1
