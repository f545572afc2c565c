"""Plans that break a rule on purpose: `plan.check` must name the rule, in every kind of step.

A guard that has become blind changes no answer until there is something to catch, so each step of a story is also shown to the check
with one thing wrong. Called by `world` for the steps that it inspects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep.plan.check import check
from lockstep.plan.step import PagedGroup, StepPlan, ints
from lockstep.types import Layout, PlanError

ALONE = "a page that a request writes is in no other place"


def unnoticed(plan: StepPlan, pool_pages: tuple[int, ...]) -> list[str]:
    """What could be done to a legal plan without the check saying so."""
    found = []
    for what, rule, spoilt in shared_pages(plan):
        try:
            check(spoilt, pool_pages)
            found.append(f"{what}: nobody noticed")
        except PlanError as error:
            if not str(error).startswith(rule):
                found.append(f"{what}: {error}")
    return found


def shared_pages(plan: StepPlan) -> Iterator[tuple[str, str, StepPlan]]:
    """For every group and request: the page where its new keys begin is somebody else's as well."""
    for g, group in enumerate(plan.groups):
        if not isinstance(group, PagedGroup) or group.spec.layout is Layout.CROSS or plan.real.requests < 2:
            continue
        for i in range(plan.real.requests):
            row, other = int(plan.q_indptr[i]), (i + 1) % plan.real.requests
            begins = min(int(plan.start[row]), int(plan.positions[row]))
            at = int(group.page_indptr[i]) + (begins - int(group.first_pos[i])) // group.spec.page_size
            theirs = int(group.page_ids[group.page_indptr[other]])
            if at < group.page_indptr[i + 1]:
                ids = group.page_ids.copy()
                ids[at] = theirs
                groups = (*plan.groups[:g], replace(group, page_ids=ints(ids)), *plan.groups[g + 1 :])
                yield f"group {g}: request {i} shares a page with request {other}", ALONE, replace(plan, groups=groups)
