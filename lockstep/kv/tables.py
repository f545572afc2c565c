"""A request's pages in every group: adopt cached ones, reserve before a step, release behind the
window, fork a second continuation.

Groups keep their keys in pools of their own, so page ids of different groups have nothing to do
with each other. All groups succeed or none does. Host only; `pages(g)` is what `plan.build` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.kv.pages import PagePool
from lockstep.plan import address, build
from lockstep.plan.step import Ints, frozen, ints
from lockstep.types import GroupSpec, Layout, RuleError


class Table:
    """The pages of one request. `reserve` before a step, `release` after it, `close` at the end."""

    def __init__(self, specs: Sequence[GroupSpec], pools: Sequence[PagePool | None]) -> None:
        self.specs, self.pools = tuple(specs), tuple(pools)
        self.first_pos = [0] * len(self.specs)
        self._pages: list[list[int]] = [[] for _ in self.specs]
        self._scratch: list[list[int]] = [[] for _ in self.specs]
        self._moves: list[list[tuple[int, int]]] = [[] for _ in self.specs]
        self._sources: list[list[int]] = [
            [] for _ in self.specs
        ]  # the parent's pages that a fork's pending moves read: held until then
        self._ids: list[Ints | None] = [None] * len(
            self.specs
        )  # `_pages` as plans take them, once somebody asked
        self._views: dict[
            Any, Any
        ] = {}  # what `pages` and `views` answered last, until something changes
        self._cached = [(g, pool) for g, pool in enumerate(self.pools) if pool is not None]
        self._windows = [(g, pool) for g, pool in self._cached if self.specs[g].window is not None]
        self.pending = False  # keys are still to be moved to their places by the next step

    def adopt(self, g: int, pages: Sequence[int], first_pos: int) -> None:
        """Group g starts with cached pages that hold the positions from `first_pos` on: one more
        hold on each."""
        pool = self.pools[g]
        if pool is None or self._pages[g] or first_pos % self.specs[g].page_size:
            rule = "an empty table adopts whole cached pages"
            got = f"group {g} from {first_pos}"
            raise RuleError(rule, got, "Adopt before the first reservation")
        pool.share(pages)
        self._pages[g], self.first_pos[g], self._ids[g] = list(pages), first_pos, None
        self._views.clear()

    def span(self, g: int, begin: int, end: int) -> list[int]:
        """The pages still held of the page-aligned positions [begin, end): the last ones of the
        range, or all."""
        size, first = self.specs[g].page_size, self.first_pos[g]
        return self._pages[g][max(0, begin - first) // size : max(0, end - first) // size]

    def swap(self, g: int, begin: int, pages: Sequence[int]) -> None:
        """From position `begin` on, `pages` take the place of the request's own, which hold the
        same keys and are given back."""
        pool, at = self.pools[g], (begin - self.first_pos[g]) // self.specs[g].page_size
        own = self._pages[g][at : at + len(pages)]
        if pool is None or at < 0 or len(own) != len(pages):
            rule = "a page is swapped for one of the same keys"
            raise RuleError(rule, f"{len(pages)} for {len(own)} from {begin}", "Swap what is held")
        if own != list(pages):
            pool.share(pages)
            pool.give(own)
            self._pages[g][at : at + len(pages)] = pages
            self._ids[g] = None
            self._views.clear()

    def reserve(self, kv_len: int, nodes: int = 0, cross_len: int = 0) -> None:
        """Pages for `kv_len` keys, `nodes` tree nodes and `cross_len` encoder keys. All groups or,
        with OutOfPages, none."""
        wanted = [
            (g, pool, *need)
            for g, pool in self._cached
            if any(need := self._need(g, kv_len, nodes, cross_len))
        ]
        taken: list[list[int]] = []
        try:
            for _, pool, pages, scratch in wanted:
                taken.append(pool.take(pages + scratch))
        except Exception:
            for (_, pool, _, _), got in zip(wanted, taken, strict=False):
                pool.give(got)
            raise
        for (g, _, pages, _), got in zip(wanted, taken, strict=True):
            self._extend(g, got[:pages])
            self._scratch[g] += got[pages:]
            self._views.clear()

    def _extend(self, g: int, pages: list[int]) -> None:
        ids = self._ids[g]
        self._pages[g] += pages
        self._ids[g] = frozen(np.concatenate((ids, ints(pages)))) if ids is not None else None

    def needs(self, kv_len: int, nodes: int = 0, cross_len: int = 0) -> list[int]:
        """Pages that such a reservation would take, per group."""
        return [sum(self._need(g, kv_len, nodes, cross_len)) for g in range(len(self.specs))]

    def room(self, g: int, more_pages: int) -> int:
        """Keys that group g could hold with so many pages more."""
        return self.first_pos[g] + (len(self._pages[g]) + more_pages) * self.specs[g].page_size

    def _need(self, g: int, kv_len: int, nodes: int, cross_len: int) -> tuple[int, int]:
        spec = self.specs[g]
        if spec.layout is Layout.FRESH:
            return 0, 0
        keys, nodes = (cross_len, 0) if spec.layout is Layout.CROSS else (kv_len, nodes)
        have = self.first_pos[g] // spec.page_size + len(self._pages[g])
        return max(0, pages_for(keys, spec) - have), max(
            0, pages_for(nodes, spec) - len(self._scratch[g])
        )

    def release(self, committed_len: int) -> list[list[int]]:
        """Drops, in window groups, the pages that no row at or after `committed_len` can see.
        Returns the pages freed, per group."""
        freed: list[list[int]] = [[] for _ in self.specs]
        for g, pool in self._windows:
            spec, keep = self.specs[g], keep_from(self.specs[g], committed_len)
            gone = self._pages[g][: max(0, keep - self.first_pos[g]) // spec.page_size]
            if gone:
                self._drop(g, len(gone))
                freed[g] = pool.give(gone)
        return freed

    def _drop(self, g: int, count: int) -> None:
        ids = self._ids[g]
        del self._pages[g][:count]
        self._ids[g] = ids[count:] if ids is not None else None
        self.first_pos[g] += count * self.specs[g].page_size
        self._views.clear()

    def fork(self, committed_len: int) -> Table:
        """A second continuation of the first `committed_len` keys: whole pages are shared, the
        partial last one is moved into its own.

        The child holds the parent's partial page until the moves are done: the parent may end, or
        swap it, before.
        """
        if self.pending:
            rule = "a request is forked when its keys are in place"
            raise RuleError(rule, "moves still pending", "Fork after the step that carries them")
        child = Table(self.specs, self.pools)
        child.first_pos = list(self.first_pos)
        partial = [self._partial(g, committed_len) for g in range(len(self.specs))]
        for g, pool in enumerate(self.pools):
            if pool is not None:
                child._pages[g] = shared_pages(
                    self.specs[g],
                    self._pages[g],
                    self.first_pos[g],
                    self._fork_len(g, committed_len),
                )
                pool.share(child._pages[g])
        try:
            child.reserve(committed_len)
        except Exception:
            child.close()
            raise
        for g, positions in enumerate(partial):
            if len(positions):
                moved = np.stack((self.slots(g, positions), child.slots(g, positions)), 1)
                child._moves[g] += [(int(a), int(b)) for a, b in moved]
                child.pending = True
                child._hold_source(g, moved[0, 0])
        return child

    def _hold_source(self, g: int, slot: int) -> None:
        pool, page = self.pools[g], int(slot) // self.specs[g].page_size
        if pool is not None:
            pool.share([page])
            self._sources[g].append(page)

    def _fork_len(self, g: int, committed_len: int) -> int:
        """Keys of group g that a fork sees. An encoder is complete and read only: all of its pages
        are shared."""
        if self.specs[g].layout is Layout.CROSS:
            return len(self._pages[g]) * self.specs[g].page_size
        return committed_len

    def _partial(self, g: int, committed_len: int) -> NDArray[np.int32]:
        """Positions of the last page that is only partly below the committed length."""
        size, end = self.specs[g].page_size, self._fork_len(g, committed_len)
        begin = max(end // size * size, self.first_pos[g])
        return np.arange(begin, end if self.pools[g] is not None else begin, dtype=np.int32)

    def accept(self, committed_len: int, nodes: Sequence[int]) -> None:
        """The path `nodes` becomes committed: its keys move, before the next step's write, from
        scratch to where they belong."""
        positions = committed_len + np.arange(len(nodes), dtype=np.int32)
        for g, spec in enumerate(self.specs):
            pages = self.pages(g)
            if pages is not None and spec.layout is not Layout.CROSS:
                source = build.node_slots(spec, pages, np.asarray(nodes, np.int32))
                self._moves[g] += [
                    (int(a), int(b)) for a, b in zip(source, self.slots(g, positions), strict=True)
                ]
                self.pending = self.pending or len(nodes) > 0
                self._views.clear()

    def held(self, g: int) -> list[int]:
        """Every hold of this table on pages of group g, one entry per hold."""
        return self._pages[g] + self._scratch[g] + self._sources[g]

    def pages(self, g: int) -> build.Pages | None:
        """The request's pages in group g, as a plan takes them."""
        if self.pools[g] is None:
            return None
        view = self._views.get(g)
        if view is None:
            ids = self._ids[g]
            if ids is None:
                ids = self._ids[g] = ints(self._pages[g])
            scratch = ints(self._scratch[g]) if self._scratch[g] else build.NO_PAGES
            moves = ints(np.array(self._moves[g], np.int32)) if self._moves[g] else build.NO_MOVES
            view = self._views[g] = build.Pages(ids, self.first_pos[g], scratch, moves)
        return view

    def views(self, groups: tuple[int, ...]) -> tuple[build.Pages | None, ...]:
        """`pages` of several groups."""
        found = self._views.get(groups)
        if found is None:
            found = self._views[groups] = tuple([self.pages(g) for g in groups])
        return found

    def moved(self) -> list[list[int]]:
        """The step that carried the pending moves has been launched. Returns the pages freed, per
        group."""
        if not self.pending:
            return [[] for _ in self.specs]
        held = zip(self.pools, self._sources, strict=True)
        freed = [pool.give(sources) if pool is not None else [] for pool, sources in held]
        self._moves, self._sources, self.pending = (
            [[] for _ in self.specs],
            [[] for _ in self.specs],
            False,
        )
        self._views.clear()
        return freed

    def drop_scratch(self) -> None:
        """A plain step has been launched behind the tree's moves: nobody reads its nodes again."""
        if not self.pending and any(self._scratch):
            for g, pool in self._cached:
                pool.give(self._scratch[g])
                self._scratch[g] = []
            self._views.clear()

    def slots(self, g: int, positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Where positions of this request lie in group g's pool."""
        pages, first = np.array(self._pages[g], np.int32), np.array([self.first_pos[g]], np.int32)
        return np.asarray(
            address.paged(
                pages, np.zeros(2, np.int32), first, self.specs[g].page_size, 0, positions
            ),
            np.int32,
        )

    def close(self) -> list[list[int]]:
        """Gives everything back. Returns the pages freed, per group."""
        freed = [
            pool.give(self.held(g)) if pool is not None else [] for g, pool in enumerate(self.pools)
        ]
        self._pages, self._scratch, self._sources = (
            [[] for _ in self.specs],
            [[] for _ in self.specs],
            [[] for _ in self.specs],
        )
        self._moves, self._ids, self.pending = (
            [[] for _ in self.specs],
            [None] * len(self.specs),
            False,
        )
        self._views.clear()
        return freed


def pages_for(keys: int, spec: GroupSpec) -> int:
    """Pages that hold `keys` keys."""
    return -(-keys // spec.page_size)


def peak_pages(spec: GroupSpec, keys: int, step_len: int) -> int:
    """The most pages that a request of `keys` keys holds at a time if it grows by at most
    `step_len` rows per step."""
    return held_pages(spec, keys, 1, step_len)


def held_pages(spec: GroupSpec, keys: int, requests: int, step_len: int) -> int:
    """The most pages that `requests` requests of `keys` keys in all hold at a time, if a step adds
    at most `step_len` rows to them.

    Behind a window a request that grows by s rows holds [keep_from(c), c + s), wherever the pages
    begin: at most (window - 1 + s + page_size - 2) // page_size + 1 of them.
    """
    if spec.window is None:
        return pages_for(keys, spec)
    slots = requests * (spec.window + 2 * spec.page_size - 3) + step_len
    return min(pages_for(keys, spec), slots // spec.page_size)


def keep_from(spec: GroupSpec, committed_len: int) -> int:
    """The first position that the next row, at `committed_len`, can see."""
    return max(0, committed_len - spec.window + 1) if spec.window is not None else 0


def shared_pages(spec: GroupSpec, pages: list[int], first_pos: int, length: int) -> list[int]:
    """The pages of a parent that lie wholly below `length`: the only ones that two requests may
    both hold."""
    return pages[: max(0, length - first_pos) // spec.page_size]
