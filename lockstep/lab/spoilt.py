"""Plans that break a rule on purpose: `plan.check` must name the rule (spoilt.toml), in every kind
of step. A check that went blind changes no answer until there is something to catch. The attention
harness calls this for the steps that it inspects."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lockstep.lab import table
from lockstep.plan.check import check
from lockstep.plan.step import PagedGroup, StepPlan, ints
from lockstep.types import Layout, PlanError

FAR = 2**30  # outside of every pool
RULES = table("spoilt.toml")


def unnoticed(plan: StepPlan, pool_pages: tuple[int, ...]) -> list[str]:
    """Describes the breaks of a legal plan that the check does not refuse by the right rule."""
    found = []
    for what, rule, spoilt in variants(plan):
        try:
            check(spoilt, pool_pages)
            found.append(f"{what}: plan.check accepted it")
        except PlanError as error:
            if not str(error).startswith(rule):
                found.append(f"{what}: {error}")
    return found


def variants(plan: StepPlan) -> Iterator[tuple[str, str, StepPlan]]:
    """Yields (what was changed, mostly in the last request; the rule's beginning; the plan)."""
    if not plan.real.requests:
        return
    for what, spoilt in spoilt_rows(plan):
        yield what, RULES[what], spoilt
    for g, group in enumerate(plan.groups):
        if isinstance(group, PagedGroup):
            for what, other in spoilt_group(plan, group):
                groups = (*plan.groups[:g], other, *plan.groups[g + 1 :])
                yield f"group {g}: {what}", RULES[what].format(g=g), replace(plan, groups=groups)


def changed(owner: Any, name: str, at: Any, value: int) -> Any:
    """Returns the plan or group with one entry of the array `name` changed."""
    array = getattr(owner, name).copy()
    array[at] = value
    return replace(owner, **{name: ints(array)})


def raised(owner: Any, name: str, at: Any) -> Any:
    return changed(owner, name, at, int(getattr(owner, name)[at]) + 1)


def spoilt_rows(plan: StepPlan) -> Iterator[tuple[str, StepPlan]]:
    row, last = int(plan.q_indptr[plan.real.requests - 1]), plan.real.tokens - 1
    yield "rows begin at 1", changed(plan, "q_indptr", 0, 1)
    yield "lists begin at 1", changed(plan, "tail_indptr", 0, 1)
    yield "a list begins late", raised(plan, "start", row)
    if len(plan.emit):
        yield "a row that is not there is emitted", changed(plan, "emit", -1, plan.bucket.tokens)
    if row < last and plan.start[row] > plan.positions[row]:
        moved = raised(plan, "positions", row)
        yield "a row stands one too far", raised(moved, "start", row)


def spoilt_group(plan: StepPlan, group: PagedGroup) -> Iterator[tuple[str, PagedGroup]]:
    i, slots, size = plan.real.requests - 1, group.write_slots, group.spec.page_size
    first_page, end_page = group.page_indptr[i : i + 2].tolist()
    begin, end = plan.q_indptr[i : i + 2].tolist()
    yield "one length too many", replace(group, kv_lens=ints([*group.kv_lens, 1]))
    beyond = len(group.page_ids) + 1
    yield "a table beyond the bucket's", changed(group, "page_indptr", -1, beyond)
    if first_page < end_page:
        yield "a page outside of the pool", changed(group, "page_ids", first_page, FAR)
    if len(group.moves):
        yield "a move outside of the pool", changed(group, "moves", (-1, 1), FAR)
    if len(slots):
        yield "a write outside of the pool", changed(group, "write_slots", end - 1, FAR)
    if group.spec.layout is Layout.CROSS:
        return
    yield from shared_pages(plan, group)
    yield "a key too many", raised(group, "kv_lens", i)
    if size > 1:
        yield "pages that begin in the middle of one", raised(group, "first_pos", i)
    if group.spec.window is None:
        yield "keys dropped without a window", changed(group, "first_pos", i, size)
    else:
        visible = max(0, int(plan.positions[begin:end].min()) - group.spec.window + 1)
        dropped = (visible // size + 1) * size
        yield "a visible key dropped", changed(group, "first_pos", i, dropped)
    if int(group.first_pos[i]) + (end_page - first_page - 1) * size < group.kv_lens[i]:
        short = group.page_indptr.copy()
        short[i + 1 :] -= 1
        yield "a page too few", replace(group, page_indptr=ints(short))
    arrays = [("a write into another's page", "one slot for two rows", "write_slots", end - 1)]
    if plan.tail_indptr[end] > plan.tail_indptr[end - 1]:  # it has tree rows: their lists, too
        entry = int(plan.tail_indptr[end]) - 1
        yield "a list outside of the pool", changed(group, "tail_slots", entry, FAR)
        names = "a list in another's pages", "a list that ends elsewhere"
        arrays.append((*names, "tail_slots", entry))
    for in_another, elsewhere, name, at in arrays:
        if i > 0:
            yield in_another, changed(group, name, at, int(slots[0]))
        if end - begin > 1:
            yield elsewhere, changed(group, name, at, int(slots[end - 2]))


def shared_pages(plan: StepPlan, group: PagedGroup) -> Iterator[tuple[str, PagedGroup]]:
    """For each request, shares the page where its new keys begin with the next request."""
    count = plan.real.requests
    for i in range(count if count > 1 else 0):
        row, other = int(plan.q_indptr[i]), (i + 1) % count
        begins = min(int(plan.start[row]), int(plan.positions[row]))
        at = int(group.page_indptr[i]) + (begins - int(group.first_pos[i])) // group.spec.page_size
        theirs = int(group.page_ids[group.page_indptr[other]])
        if at < group.page_indptr[i + 1]:
            yield "a request shares a page with the next", changed(group, "page_ids", at, theirs)
