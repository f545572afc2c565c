"""What a legal plan is. `check` runs before every step; it is the specification in executable form.

Shapes are compared here; what stands in the arrays is judged by the loops of `rules`, which name
the first rule that is broken. Knows plans and pool sizes, and nothing about who built the plan.
"""

import numpy as np

from lockstep.plan import rules
from lockstep.plan.step import PagedGroup, StepPlan
from lockstep.types import INT32_MAX, Layout, PlanError


def check(plan: StepPlan, pool_pages: tuple[int, ...]) -> None:
    """Raises PlanError unless `plan` is legal for pools of so many pages (0 for a fresh group)."""
    if len(pool_pages) != len(plan.groups):
        got = f"{len(pool_pages)} pools, {len(plan.groups)} groups"
        raise PlanError("there is one pool per group", got, "Pass both")
    _check_rows(plan)
    for g, group in enumerate(plan.groups):
        if isinstance(group, PagedGroup):
            _check_group(plan, g, group, pool_pages[g])
            continue
        offsets = np.arange(len(plan.positions)) - plan.q_indptr[:-1][plan.request]
        if not (plan.positions == offsets).all():
            rule, got = "a fresh group computes whole requests", "rows that start after position 0"
            raise PlanError(rule, got, "Do not chunk them")


def _check_rows(plan: StepPlan) -> None:
    b, real = plan.bucket, plan.real
    rows = (plan.q_indptr, plan.positions, plan.start, plan.tail_indptr, plan.emit)
    shape = (b.requests + 1, b.tokens, b.tokens, b.tokens + 1, b.emits)
    _shape("rows have", tuple(map(len, rows)), shape)
    if not 0 <= real.requests <= b.requests or real.emits > b.emits:
        raise PlanError("real entries come first", f"{real} in {b}", "Pad after the last")
    if b.requests == real.requests and b.tokens != real.tokens:
        raise PlanError("a pad row belongs to a pad request", f"{real} in {b}", "Use Buckets.fit")
    judge_rows, _ = rules.compiled()
    _judge(judge_rows(rows[:4], plan.emit, real.requests, real.tokens, b.tail), "rows")


def _check_group(plan: StepPlan, g: int, group: PagedGroup, pool_pages: int) -> None:
    b, size, cross = plan.bucket, group.spec.page_size, group.spec.layout is Layout.CROSS
    pages = (group.kv_lens, group.page_indptr, group.page_ids, group.first_pos)
    arrays = (*pages, group.tail_slots, group.write_slots)
    shape = (b.requests, b.requests + 1, b.pages[g], b.requests, b.tokens * b.tail, b.writes[g])
    have = (*map(len, arrays), *group.moves.shape)
    _shape(f"group {g} has", have, (*shape, b.moves[g], 2))
    if b.writes[g] != b.tokens and not (cross and b.writes[g] == 0):
        got = f"{b.writes[g]} of {b.tokens}"
        raise PlanError("every row is written (cross: or none)", got, "Use plan.build")
    if pool_pages * size > INT32_MAX:
        got = f"{pool_pages} pages of {size}"
        raise PlanError("a pool's slots fit in int32", got, "Use a smaller pool")
    rows = (plan.q_indptr, plan.positions, plan.start, plan.tail_indptr)
    limits = (size, group.spec.window or 0, cross, pool_pages)
    _, judge_group = rules.compiled()
    _judge(judge_group(rows, arrays, group.moves, *limits), f"group {g}")


def _shape(what: str, have: tuple[int, ...], want: tuple[int, ...]) -> None:
    if have != want:
        rule = f"{what} the bucket's shape {want}"
        raise PlanError(rule, str(have), "Use plan.build and plan.pad")


def _judge(found: tuple[int, int, int, int], where: str) -> None:
    rule, have, want, at = found
    if rule:
        text, got, remedy = rules.TEXTS[rule]
        values = f"{got.format(have=have, want=want)} ({where}, entry {at})"
        raise PlanError(text.format(want=want), values, remedy)
