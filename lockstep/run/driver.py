"""Steps that nobody schedules: reserve, build, pad, check, lower and launch, in one call.

For certification, the lab, benchmarks and tests, which want a step and no queue:

    driver = StepDriver(kinds_of(model, info), [pages] * groups, backend)
    request = driver.request()
    hidden = driver.step(driver.kinds[GENERATE], [Share(request, prompt)]).rows
    hidden = driver.step(driver.kinds[GENERATE], [Share(request, [token], len(prompt))]).rows

Knows no sampling and no end of a request: `PageTable.release` and `close` are the caller's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.plan.build import RequestWork, build, paths
from lockstep.plan.step import StepPlan
from lockstep.run.kind import ENCODE, Kinds, StepKind, group_specs
from lockstep.run.runner import Runner, StepOutput
from lockstep.types import Layout


class Share(NamedTuple):
    """One request's part of a step."""

    request: PageTable
    ids: Sequence[int] | Tensor  # the tokens of its rows: the first stands at position cached_len
    cached_len: int = 0  # keys that it has already
    parents: tuple[int, ...] | None = None  # the tree so far; its last len(ids) nodes are the rows
    emit: tuple[int, ...] | None = None  # rows whose logits are wanted; None = the last one
    cross_len: int = 0  # keys of its encoder; an encode step writes as many as it has rows


class StepDriver:
    """Requests of a model on pools of `pages` pages per group (0 for one without a cache)."""

    def __init__(self, kinds: Kinds, pages: Sequence[int], backend: Backend) -> None:
        self.kinds = kinds
        ops = next(iter(kinds.values())).model.ops
        self.runner = Runner(group_specs(kinds.values()), pages, backend, ops)
        self.page_pools = [PagePool(n) if n else None for n in pages]
        self.cache = CacheGroups(self.runner.specs, self.page_pools)

    def request(self) -> PageTable:
        """A request without keys."""
        return PageTable(self.cache)

    def plan(self, kind: StepKind, shares: Sequence[Share]) -> StepPlan:
        """The plan of a step, pages reserved."""
        keeps = any(spec.causal and spec.layout is not Layout.FRESH for spec in kind.specs)
        works = []
        for share in shares:
            new_len, parents = len(share.ids), share.parents
            depth = max(map(len, paths(parents, len(parents)))) if parents else new_len
            cross_len = new_len if kind.name == ENCODE else share.cross_len
            kv_len = share.cached_len + depth if keeps else 0
            share.request.reserve(kv_len, len(parents or ()), cross_len)
            work = RequestWork(
                cached_len=share.cached_len,
                new_len=new_len,
                pages=share.request.views(kind.groups),
                emit=share.emit,
                parents=parents,
                cross_len=cross_len,
                cross_new=new_len if kind.name == ENCODE else 0,
            )
            works.append(work)
        return build(kind.specs, works)

    def step(self, kind: StepKind, shares: Sequence[Share]) -> StepOutput:
        """Computes the rows of all shares, in order."""
        ids = torch.cat([torch.as_tensor(share.ids) for share in shares])
        out = self.runner.run(self.plan(kind, shares), ids, kind)
        for share in shares:
            share.request.moved()
        return out
