"""A request's pages in every group: adopt cached ones, reserve before a step, release behind the
window, fork a second continuation.

Groups keep their keys in pools of their own, so page ids of different groups have nothing to do
with each other. All groups succeed or none does. Host only; `pages(g)` is what `plan.build` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.kv.pages import PagePool
from lockstep.plan import address, build
from lockstep.plan.step import frozen, ints
from lockstep.types import GroupSpec, Layout, RuleError

Int32s = NDArray[np.int32]
SPARE = 16  # pages that a table's array has room for, behind those that it was made with


@dataclass(frozen=True, eq=False)
class CacheGroups:
    """The groups of an engine and their pages, which the tables of its requests and the prefix
    cache share. `drafts` are those of a draft model; one without a pool keeps nothing."""

    specs: Sequence[GroupSpec]
    pools: Sequence[PagePool | None]
    drafts: Sequence[int] = ()

    @cached_property
    def cached(self) -> list[tuple[int, PagePool]]:
        return [(g, pool) for g, pool in enumerate(self.pools) if pool is not None]

    @cached_property
    def windows(self) -> list[tuple[int, PagePool]]:
        """Those whose first pages go."""
        return [(g, pool) for g, pool in self.cached if self.specs[g].window is not None]

    @cached_property
    def stored(self) -> list[int]:
        """Those that grow with the request."""
        return [g for g, _ in self.cached if self.specs[g].layout is not Layout.CROSS]

    def plain(self) -> CacheGroups:
        """Of a request without a draft."""
        pools = [None if g in self.drafts else pool for g, pool in enumerate(self.pools)]
        return CacheGroups(self.specs, pools, self.drafts)


class PageTable:
    """The pages of one request. `reserve` before a step, `release` after it, `close` at the end.
    Of a draft model's keys, which may lag behind the target's, those below `draft_len` exist."""

    def __init__(self, groups: CacheGroups) -> None:
        self.groups, self.specs, self.pools = groups, groups.specs, groups.pools
        self.draft_len = 0
        self.first_pos = [0] * len(self.specs)
        self._empty()

    def _empty(self) -> None:
        self._pages: list[list[int]] = self._lists()
        self._scratch: list[list[int]] = self._lists()
        self._moves: list[list[tuple[int, int]]] = self._lists()
        # the parent's pages that a fork's pending moves read: held until then
        self._sources: list[list[int]] = self._lists()
        # `_pages` as plans take them, once somebody asked, and room for more
        self._ids: list[Int32s | None] = [None] * len(self.specs)
        # what `pages` and `views` answered last, until something changes
        self._views: dict[Any, Any] = {}
        self.pending = False  # keys are still to be moved to their places by the next step

    def _lists(self) -> list[list[Any]]:
        return [[] for _ in self.specs]

    def adopt(self, g: int, pages: Sequence[int], first_pos: int) -> None:
        """Group g starts with cached pages of the positions from `first_pos` on, and holds them."""
        pool = self.pools[g]
        if pool is None or self._pages[g] or first_pos % self.specs[g].page_size:
            rule = "an empty table adopts whole cached pages"
            got = f"group {g} from {first_pos}"
            raise RuleError(rule, got, "Adopt before the first reservation")
        pool.share(pages)
        self._pages[g], self.first_pos[g], self._ids[g] = list(pages), first_pos, None
        self._views.clear()

    def span(self, g: int, begin: int, end: int) -> list[int]:
        """The pages of the page-aligned positions [begin, end) that are still held: the last."""
        size, first = self.specs[g].page_size, self.first_pos[g]
        return self._pages[g][max(0, begin - first) // size : max(0, end - first) // size]

    def swap(self, g: int, begin: int, pages: Sequence[int]) -> None:
        """From `begin` on, `pages` replace the request's own of the same keys, which go back."""
        pool, at = self.pools[g], (begin - self.first_pos[g]) // self.specs[g].page_size
        own = self._pages[g][at : at + len(pages)]
        if pool is None or at < 0 or len(own) != len(pages):
            rule = "a page is swapped for one of the same keys"
            raise RuleError(rule, f"{len(pages)} for {len(own)} from {begin}", "Swap what is held")
        if own != list(pages):
            pool.share(pages)
            pool.give(own)
            self._pages[g][at : at + len(pages)] = pages
            ids = self._ids[g]
            if ids is not None:
                ids = self._ids[g] = ids.copy()
                ids[at : at + len(pages)] = pages
            self._views.clear()

    def reserve(self, kv_len: int, nodes: int = 0, cross_len: int = 0) -> None:
        """Pages for so many keys, nodes and encoder keys: in all groups or none (OutOfPages)."""
        taken: list[tuple[int, PagePool, int, list[int]]] = []
        try:
            for g, pool in self.groups.cached:
                pages, scratch = self._need(g, kv_len, nodes, cross_len)
                if pages or scratch:
                    taken.append((g, pool, pages, pool.take(pages + scratch)))
        except Exception:
            for _, pool, _, got in taken:
                pool.give(got)
            raise
        for g, _, pages, got in taken:
            self._append(g, got[:pages])
            self._scratch[g] += got[pages:]
            self._views.clear()

    def _append(self, g: int, pages: list[int]) -> None:
        """Behind what is there; an array that was handed out does not see it."""
        ids, begin, end = self._ids[g], len(self._pages[g]), len(self._pages[g]) + len(pages)
        if ids is not None and end <= len(ids):
            ids[begin:end] = pages
        else:
            self._ids[g] = None
        self._pages[g] += pages

    def needs(self, kv_len: int, nodes: int = 0, cross_len: int = 0) -> list[int]:
        """Pages that such a reservation would take, per group."""
        return [sum(self._need(g, kv_len, nodes, cross_len)) for g in range(len(self.specs))]

    def room(self, g: int, more_pages: int) -> int:
        """Keys that group g could hold with so many pages more."""
        return self.first_pos[g] + (len(self._pages[g]) + more_pages) * self.specs[g].page_size

    def _need(self, g: int, kv_len: int, nodes: int, cross_len: int) -> tuple[int, int]:
        spec = self.specs[g]
        if self.pools[g] is None:
            return 0, 0
        if spec.layout is Layout.CROSS:
            kv_len, nodes = cross_len, 0
        pages = pages_for(kv_len - self.room(g, 0), spec)
        scratch = pages_for(nodes, spec) - len(self._scratch[g])
        return max(0, pages), max(0, scratch)

    def release(self, committed_len: int) -> list[list[int]]:
        """Drops pages that no row from `committed_len` on sees. Returns those freed, per group."""
        freed: list[list[int]] = self._lists()
        for g, pool in self.groups.windows:
            spec, ids = self.specs[g], self._ids[g]
            hidden_len = max(0, keep_from(spec, self._len(g, committed_len)) - self.first_pos[g])
            gone = self._pages[g][: hidden_len // spec.page_size]
            if gone:
                del self._pages[g][: len(gone)]
                self._ids[g] = ids[len(gone) :] if ids is not None else None
                self.first_pos[g] += len(gone) * spec.page_size
                self._views.clear()
                freed[g] = pool.give(gone)
        return freed

    def fork(self, committed_len: int) -> PageTable:
        """A second continuation of the first `committed_len` keys: whole pages are shared, the
        partial last one is moved into its own. The child holds the parent's partial page until the
        moves are done: the parent may end, or swap it, before."""
        if self.pending:
            rule = "a request is forked when its keys are in place"
            raise RuleError(rule, "moves still pending", "Fork after the step that carries them")
        child = PageTable(self.groups)
        child.first_pos, child.draft_len = list(self.first_pos), self.draft_len
        for g, pool in self.groups.cached:
            length, first_pos = self._fork_len(g, committed_len), self.first_pos[g]
            whole = shared_pages(self.specs[g], self._pages[g], first_pos, length)
            pool.share(whole)
            child._pages[g] = whole
        try:
            child.reserve(committed_len)
        except Exception:
            child.close()
            raise
        for g, pool in self.groups.cached:
            positions = self._partial(g, committed_len)
            if len(positions):
                sources = self.slots(g, positions)
                child._move(g, sources, positions)
                page = int(sources[0]) // self.specs[g].page_size
                pool.share([page])
                child._sources[g].append(page)
        return child

    def _move(self, g: int, sources: Int32s, positions: Int32s) -> None:
        """The keys in these slots belong to these positions."""
        self._moves[g] += zip(sources.tolist(), self.slots(g, positions).tolist(), strict=True)
        self.pending = self.pending or len(positions) > 0
        self._views.clear()

    def _fork_len(self, g: int, committed_len: int) -> int:
        """Keys of group g that a fork sees. An encoder is read only: all its pages are shared."""
        if self.specs[g].layout is Layout.CROSS:
            return len(self._pages[g]) * self.specs[g].page_size
        return self._len(g, committed_len)

    def _len(self, g: int, committed_len: int) -> int:
        """Keys of group g that are there, if so many are committed."""
        return min(committed_len, self.draft_len) if g in self.groups.drafts else committed_len

    def fork_needs(self, committed_len: int) -> list[int]:
        """Pages that a fork would take, per group."""
        needs = [0] * len(self.specs)
        for g in self.groups.stored:
            spec = self.specs[g]
            shared = self._fork_len(g, committed_len) // spec.page_size
            needs[g] = pages_for(committed_len, spec) - shared
        return needs

    def _partial(self, g: int, committed_len: int) -> Int32s:
        """Positions of the last page that is only partly below the committed length."""
        size, end = self.specs[g].page_size, self._fork_len(g, committed_len)
        return np.arange(max(end // size * size, self.first_pos[g]), end, dtype=np.int32)

    def accept(self, committed_len: int, nodes: Sequence[int]) -> None:
        """The path `nodes` is committed: before the next step's write its keys move from scratch to
        where they belong. A draft model computes its own anew."""
        positions = committed_len + np.arange(len(nodes), dtype=np.int32)
        for g in self.groups.stored:
            pages = self.pages(g)
            if pages is not None and g not in self.groups.drafts:
                sources = build.node_slots(self.specs[g], pages, np.asarray(nodes, np.int32))
                self._move(g, sources, positions)

    def held(self, g: int) -> list[int]:
        """Every hold of this table on pages of group g, one entry per hold."""
        return self._pages[g] + self._scratch[g] + self._sources[g]

    def pages(self, g: int) -> build.RequestPages | None:
        """The request's pages in group g, as a plan takes them."""
        if self.pools[g] is None:
            return None
        view = self._views.get(g)
        if view is None:
            ids, count = self._ids[g], len(self._pages[g])
            if ids is None:
                ids = self._ids[g] = np.zeros(count + SPARE, np.int32)
                ids[:count] = self._pages[g]
            scratch = ints(self._scratch[g]) if self._scratch[g] else build.NO_PAGES
            moves = ints(np.array(self._moves[g], np.int32)) if self._moves[g] else build.NO_MOVES
            view = self._views[g] = build.RequestPages(
                frozen(ids[:count]), self.first_pos[g], scratch, moves
            )
        return view

    def views(self, groups: tuple[int, ...]) -> tuple[build.RequestPages | None, ...]:
        """`pages` of several groups."""
        found = self._views.get(groups)
        if found is None:
            found = self._views[groups] = tuple([self.pages(g) for g in groups])
        return found

    def moved(self, groups: Sequence[int] | None = None) -> list[list[int]]:
        """A step of these groups, or of all, carried their moves. Returns the pages freed."""
        freed = self._lists()
        if self.pending:
            for g, pool in self.groups.cached:
                if groups is None or g in groups:
                    freed[g] = pool.give(self._sources[g])
                    self._moves[g], self._sources[g] = [], []
            self.pending = any(self._moves)
            self._views.clear()
        return freed

    def drop_scratch(self) -> None:
        """A plain step has been launched behind the tree's moves: nobody reads its nodes again."""
        if any(self._scratch):
            for g, pool in self.groups.cached:
                pool.give(self._scratch[g])
                self._scratch[g] = []
            self._views.clear()

    def slots(self, g: int, positions: Int32s) -> Int32s:
        """Where positions of this request lie in group g's pool."""
        pages, first = np.array(self._pages[g], np.int32), np.array([self.first_pos[g]], np.int32)
        indptr, size = np.zeros(2, np.int32), self.specs[g].page_size
        slots = address.paged(pages, indptr, first, page_size=size, request=0, p=positions)
        return np.asarray(slots, np.int32)

    def close(self) -> list[list[int]]:
        """Gives everything back. Returns the pages freed, per group."""
        freed = self._lists()
        for g, pool in self.groups.cached:
            freed[g] = pool.give(self.held(g))
        self._empty()
        return freed


def pages_for(keys: int, spec: GroupSpec) -> int:
    return -(-keys // spec.page_size)


def peak_pages(spec: GroupSpec, keys: int, step_len: int) -> int:
    """The most pages that a request of `keys` keys holds if steps add at most `step_len` rows."""
    return held_pages(spec, keys, 1, step_len)


def held_pages(spec: GroupSpec, keys: int, requests: int, step_len: int) -> int:
    """The most pages that `requests` requests of `keys` keys in all hold at a time, if a step adds
    at most `step_len` rows to them. Behind a window a request that grows by s rows holds
    [keep_from(c), c + s), wherever the pages begin: at most (window - 1 + s + page_size - 2) //
    page_size + 1 of them."""
    if spec.window is None:
        return pages_for(keys, spec)
    slots = requests * (spec.window + 2 * spec.page_size - 3) + step_len
    return min(pages_for(keys, spec), slots // spec.page_size)


def keep_from(spec: GroupSpec, committed_len: int) -> int:
    """The first position that the next row, at `committed_len`, can see."""
    return max(0, committed_len - spec.window + 1) if spec.window is not None else 0


def shared_pages(spec: GroupSpec, pages: list[int], first_pos: int, length: int) -> list[int]:
    """The pages of a parent wholly below `length`: the only ones that two requests may hold."""
    return pages[: max(0, length - first_pos) // spec.page_size]
