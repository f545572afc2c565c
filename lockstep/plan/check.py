"""What a legal plan is. `check` runs before every step; it is the specification in executable form.

Shapes are compared here; what stands in the arrays is judged by the loops of `rules`, which name
the first rule that is broken. Knows plans and pool sizes, and nothing about who built the plan.
"""

from __future__ import annotations

import numpy as np

from lockstep.plan import rules
from lockstep.plan.step import PagedGroup, StepPlan
from lockstep.types import INT32_MAX, Layout, PlanError


def check(plan: StepPlan, pool_pages: tuple[int, ...]) -> None:
    """Raises PlanError unless `plan` is legal for pools of `pool_pages` pages, one number per group
    (0 for a fresh one)."""
    if len(pool_pages) != len(plan.groups):
        raise PlanError(
            "there is one pool per group",
            f"{len(pool_pages)} pools, {len(plan.groups)} groups",
            "Pass both",
        )
    _check_rows(plan)
    for g, group in enumerate(plan.groups):
        if isinstance(group, PagedGroup):
            _check_group(plan, g, group, pool_pages[g])
        elif not (
            plan.positions == np.arange(len(plan.positions)) - plan.q_indptr[:-1][plan.request]
        ).all():
            raise PlanError(
                "a fresh group computes whole requests",
                "rows that start after position 0",
                "Do not chunk them",
            )


def _check_rows(plan: StepPlan) -> None:
    b, real = plan.bucket, plan.real
    shape = (
        len(plan.q_indptr) - 1,
        len(plan.positions),
        len(plan.start),
        len(plan.tail_indptr) - 1,
        len(plan.emit),
    )
    _shape("rows have", shape, (b.requests, b.tokens, b.tokens, b.tokens, b.emits))
    if not 0 <= real.requests <= b.requests or real.emits > b.emits:
        raise PlanError("real entries come first", f"{real} in {b}", "Pad after the last")
    if b.requests == real.requests and b.tokens != real.tokens:
        raise PlanError("a pad row belongs to a pad request", f"{real} in {b}", "Use Buckets.fit")
    rows = (plan.q_indptr, plan.positions, plan.start, plan.tail_indptr, plan.emit)
    _judge(rules.compiled()[0](*rows, real.requests, real.tokens, b.tail), "rows")


def _check_group(plan: StepPlan, g: int, group: PagedGroup, pool_pages: int) -> None:
    b, size, cross = plan.bucket, group.spec.page_size, group.spec.layout is Layout.CROSS
    shape = (
        len(group.kv_lens),
        len(group.page_indptr) - 1,
        len(group.first_pos),
        len(group.page_ids),
        len(group.tail_slots),
        len(group.write_slots),
        group.moves.shape,
    )
    _shape(
        f"group {g} has",
        shape,
        (
            b.requests,
            b.requests,
            b.requests,
            b.pages[g],
            b.tokens * b.tail,
            b.writes[g],
            (b.moves[g], 2),
        ),
    )
    if b.writes[g] != b.tokens and not (cross and b.writes[g] == 0):
        raise PlanError(
            "every row is written (cross: or none)",
            f"{b.writes[g]} of {b.tokens}",
            "Use plan.build",
        )
    if pool_pages * size > INT32_MAX:
        raise PlanError(
            "a pool's slots fit in int32", f"{pool_pages} pages of {size}", "Use a smaller pool"
        )
    rows = (plan.q_indptr, plan.positions, plan.start, plan.tail_indptr)
    arrays = (
        group.kv_lens,
        group.page_indptr,
        group.page_ids,
        group.first_pos,
        group.tail_slots,
        group.write_slots,
        group.moves,
    )
    _judge(
        rules.compiled()[1](*rows, *arrays, size, group.spec.window or 0, cross, pool_pages),
        f"group {g}",
    )


def _shape(what: str, have: tuple[object, ...], want: tuple[object, ...]) -> None:
    if have != want:
        raise PlanError(
            f"{what} the bucket's shape {want}", str(have), "Use plan.build and plan.pad"
        )


def _judge(found: tuple[int, int, int, int], where: str) -> None:
    rule, have, want, at = found
    if rule:
        text, got, remedy = rules.TEXTS[rule]
        raise PlanError(
            text.format(want=want),
            f"{got.format(have=have, want=want)} ({where}, entry {at})",
            remedy,
        )
