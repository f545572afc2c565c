"""Plans that break a rule on purpose: `plan.check` must name the rule, in every kind of step.

A guard that has become blind changes no answer until there is something to catch, so each step of a
story is also shown to the check with one thing wrong at a time. What a rule is called stands here
in full: the lab takes no words from `plan.rules`. Called by the harness
for the steps that it inspects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lockstep.plan.check import check
from lockstep.plan.step import PagedGroup, StepPlan, ints
from lockstep.types import Layout, PlanError

FAR = 2**30  # outside of every pool

Spoilt = tuple[str, str, StepPlan]  # what was done, how the rule's text begins, and the plan
SpoiltGroup = tuple[str, str, PagedGroup]  # the same of one group


def unnoticed(plan: StepPlan, pool_pages: tuple[int, ...]) -> list[str]:
    """What could be done to a legal plan without the check saying so."""
    found = []
    for what, rule, spoilt in variants(plan):
        try:
            check(spoilt, pool_pages)
            found.append(f"{what}: nobody noticed")
        except PlanError as error:
            if not str(error).startswith(rule):
                found.append(f"{what}: {error}")
    return found


def variants(plan: StepPlan) -> Iterator[Spoilt]:
    """All that is done to a plan here: to its last request, but for shared pages."""
    if not plan.real.requests:
        return
    yield from spoilt_rows(plan)
    for g, group in enumerate(plan.groups):
        if isinstance(group, PagedGroup):
            for what, rule, spoilt in spoilt_group(plan, group):
                groups = (*plan.groups[:g], spoilt, *plan.groups[g + 1 :])
                yield f"group {g}: {what}", rule.format(g=g), replace(plan, groups=groups)


def changed(owner: Any, name: str, at: Any, value: int) -> Any:
    """The same plan or group with one entry of the array called `name` changed."""
    array = getattr(owner, name).copy()
    array[at] = value
    return replace(owner, **{name: ints(array)})


def raised(owner: Any, name: str, at: Any) -> Any:
    """The same with one entry larger by one."""
    return changed(owner, name, at, int(getattr(owner, name)[at]) + 1)


def spoilt_rows(plan: StepPlan) -> Iterator[Spoilt]:
    """What all groups share."""
    row, last = int(plan.q_indptr[plan.real.requests - 1]), plan.real.tokens - 1
    yield "rows begin at 1", "q_indptr rises from 0", changed(plan, "q_indptr", 0, 1)
    yield "lists begin at 1", "tail_indptr rises from 0", changed(plan, "tail_indptr", 0, 1)
    late = raised(plan, "start", row)
    yield "a list begins late", "a row's list names each position", late
    if len(plan.emit):
        beyond = changed(plan, "emit", -1, plan.bucket.tokens)
        yield "a row that is not there is emitted", "emit names rows", beyond
    if row < last and plan.start[row] > plan.positions[row]:
        moved = raised(raised(plan, "positions", row), "start", row)
        yield "a row stands one too far", "plain rows stand at", moved


def spoilt_group(plan: StepPlan, group: PagedGroup) -> Iterator[SpoiltGroup]:
    """One group's tables, lengths, slots and lists."""
    last, cross = plan.real.requests - 1, group.spec.layout is Layout.CROSS
    longer = replace(group, kv_lens=ints([*group.kv_lens, 1]))
    yield "one length too many", "group {g} has the bucket's shape", longer
    wide = changed(group, "page_indptr", -1, len(group.page_ids) + 1)
    yield "a table beyond the bucket's", "page tables fit the bucket's", wide
    if group.page_indptr[last] < group.page_indptr[last + 1]:
        far = changed(group, "page_ids", group.page_indptr[last], FAR)
        yield "a page outside of the pool", "page ids are below the pool's", far
    if len(group.moves):
        far = changed(group, "moves", (-1, 1), FAR)
        yield "a move outside of the pool", "moves are below the pool's", far
    if len(group.write_slots):
        far = changed(group, "write_slots", plan.real.tokens - 1, FAR)
        yield "a write outside of the pool", "write slots are below the pool's", far
    if not cross:
        yield from spoilt_lengths(plan, group, last)
        yield from shared_pages(plan, group)
        yield from spoilt_writes(plan, group, last)


def spoilt_lengths(plan: StepPlan, group: PagedGroup, i: int) -> Iterator[SpoiltGroup]:
    """What a request says of its keys."""
    size, window = group.spec.page_size, group.spec.window
    first = int(plan.positions[plan.q_indptr[i] : plan.q_indptr[i + 1]].min())
    rule = "kv_len is 1 + the request's last position"
    yield "a key too many", rule, raised(group, "kv_lens", i)
    if size > 1:
        late = raised(group, "first_pos", i)
        yield "pages that begin in the middle of one", "first_pos is page-aligned", late
    if window is None:
        dropped = changed(group, "first_pos", i, size)
        yield "keys dropped without a window", "only a window drops keys", dropped
    else:
        beyond = (max(0, first - window + 1) // size + 1) * size
        dropped = changed(group, "first_pos", i, beyond)
        yield "a visible key dropped", "no visible key was dropped", dropped
    pages = int(group.page_indptr[i + 1] - group.page_indptr[i])
    if int(group.first_pos[i]) + (pages - 1) * size < group.kv_lens[i]:
        short = group.page_indptr.copy()
        short[i + 1 :] -= 1
        yield "a page too few", "pages cover every key", replace(group, page_indptr=ints(short))


def shared_pages(plan: StepPlan, group: PagedGroup) -> Iterator[SpoiltGroup]:
    """For every request: the page where its new keys begin is somebody else's as well."""
    count = plan.real.requests
    for i in range(count if count > 1 else 0):
        row, other = int(plan.q_indptr[i]), (i + 1) % count
        begins = min(int(plan.start[row]), int(plan.positions[row]))
        at = int(group.page_indptr[i]) + (begins - int(group.first_pos[i])) // group.spec.page_size
        theirs = int(group.page_ids[group.page_indptr[other]])
        if at < group.page_indptr[i + 1]:
            rule = "a page that a request writes is in no other place"
            shared = changed(group, "page_ids", at, theirs)
            yield f"request {i} shares a page with request {other}", rule, shared


def spoilt_writes(plan: StepPlan, group: PagedGroup, i: int) -> Iterator[SpoiltGroup]:
    """Where a request writes, and what the lists of its tree rows name."""
    slots, end, rows = group.write_slots, int(plan.q_indptr[i + 1]), int(plan.new_lens[i])
    theirs = int(slots[0])
    if i > 0:
        elsewhere = changed(group, "write_slots", end - 1, theirs)
        yield "a write into another's page", "a row writes to its own request's pages", elsewhere
    if rows > 1:
        twice = changed(group, "write_slots", end - 1, int(slots[end - 2]))
        yield "one slot for two rows", "write slots are distinct", twice
    entry = int(plan.tail_indptr[end]) - 1
    if plan.tail_indptr[end] == plan.tail_indptr[end - 1]:
        return
    far = changed(group, "tail_slots", entry, FAR)
    yield "a list outside of the pool", "listed slots are below the pool's", far
    if i > 0:
        elsewhere = changed(group, "tail_slots", entry, theirs)
        yield "a list in another's pages", "a row's list lies in its own", elsewhere
    if rows > 1:
        own = changed(group, "tail_slots", entry, int(slots[end - 2]))
        yield "a list that ends elsewhere", "a list ends with the row's own slot", own
