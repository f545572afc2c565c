"""Pages with reference counts, and a request's pages in every group: adopt cached pages, reserve
before a step, release what has left the window, fork a second continuation.

Page 0 is the null page: it holds padding and is never handed out. A page is free, or has
`refs[page]` holds, `tree_refs[page]` of them the prefix tree's; it is idle if all are the tree's.
Each group has a pool of its own. Host only; `plan.build` takes what `pages(g)` returns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lockstep.plan import address, build
from lockstep.plan.build import NO_MOVES, NO_PAGES, RequestPages
from lockstep.plan.step import Ints, append, freeze, ints
from lockstep.types import OUR_BUG, GroupSpec, Layout, OutOfPages, RuleError

NULL_PAGE = 0


class PagePool:
    """`take` free pages, `share` those that are held already, `give` holds back."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            rule = "a pool has the null page and at least one more"
            raise RuleError(rule, str(num_pages), "Give the cache more memory")
        self.num_pages = num_pages
        self.refs = np.zeros(num_pages, np.int32)
        self.refs[NULL_PAGE] = 1
        self.tree_refs = np.zeros(num_pages, np.int32)
        self.idle = 0  # pages that the prefix tree alone holds
        # the same memory: reading a single entry is much faster this way
        self._holds, self._tree_refs = self.refs.data, self.tree_refs.data
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Returns `count` free pages, each with one hold now; raises OutOfPages if it has fewer."""
        if count > len(self._free):
            rule = f"{len(self._free)} of {self.num_pages - 1} pages are free"
            raise OutOfPages(rule, f"a request for {count}", "Free some, or enlarge the cache")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holds[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds one hold to each page; each must be held already."""
        holds = self._holds
        for page in pages:
            if holds[page] < 1 or page == NULL_PAGE:
                got = f"page {page} with {holds[page]} holds"
                raise RuleError("only a held page can be shared", got, "Take it first")
            self.idle -= holds[page] == self._tree_refs[page]
            holds[page] += 1

    def give(self, pages: Iterable[int]) -> list[int]:
        """Removes one hold from each page; returns the pages that are free now."""
        freed, holds = [], self._holds
        for page in pages:
            if holds[page] < 1 or page == NULL_PAGE:
                rule = "a page is given back once per hold"
                raise RuleError(rule, f"page {page} with {holds[page]} holds", OUR_BUG)
            holds[page] -= 1
            if holds[page] == 0:
                freed.append(page)
            elif holds[page] == self._tree_refs[page]:
                self.idle += 1
        self._free += freed
        return freed

    def keep(self, pages: Sequence[int]) -> None:
        """Adds the prefix tree's hold to pages that are held already."""
        self.share(pages)
        for page in pages:
            self._tree_refs[page] += 1
            self.idle += self._holds[page] == self._tree_refs[page]

    def drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            if self._tree_refs[page] < 1:
                raise RuleError("the tree drops only pages it holds", f"page {page}", OUR_BUG)
            self.idle -= self._holds[page] == self._tree_refs[page]
            self._tree_refs[page] -= 1
        self.give(pages)

    def check(self) -> None:
        """Raises unless free + held = all, no page is both, and `idle` counts the idle pages."""
        held = int(np.count_nonzero(self.refs)) - 1
        idle = int(np.count_nonzero((self.tree_refs > 0) & (self.tree_refs == self.refs)))
        if idle != self.idle:
            raise RuleError(f"{idle} pages are idle", f"{self.idle} counted", OUR_BUG)
        both = any(self.refs[page] for page in self._free)
        if both or held + len(set(self._free)) != self.num_pages - 1:
            got = f"{held} held + {len(self._free)} free of {self.num_pages - 1}"
            raise RuleError("every page is free or held, never both", got, OUR_BUG)


Pools = Sequence[PagePool | None]  # one per group; None: nothing of the group is cached


@dataclass(frozen=True, eq=False)
class CacheGroups:
    """The groups of an engine and their pools; `drafts` are the numbers of a draft model's."""

    specs: Sequence[GroupSpec]
    pools: Pools
    drafts: Sequence[int] = ()

    @cached_property
    def cached(self) -> list[tuple[int, PagePool]]:
        return [(g, pool) for g, pool in enumerate(self.pools) if pool is not None]

    @cached_property
    def stored(self) -> list[int]:
        """The cached groups that grow with the request: all but cross groups."""
        return [g for g, _ in self.cached if self.specs[g].layout is not Layout.CROSS]


class PageTable:
    """The pages of one request. `reserve` before a step, `release` after it, `close` at the end.
    A draft model may have fewer keys than the target: those of positions below `draft_len`."""

    def __init__(self, groups: CacheGroups) -> None:
        self.groups, self.specs, self.pools = groups, groups.specs, groups.pools
        self.draft_len = 0
        self._empty()

    def _empty(self) -> None:
        self._own = [RequestPages() for _ in self.specs]
        self.draft_state: Any = None  # what a draft model needs for its keys from `draft_len` on
        # the parent's pages that a fork's pending moves read: held until they are done
        self._sources: list[list[int]] = [[] for _ in self.specs]
        # what `views` has returned since the last change
        self._views: dict[tuple[int, ...], tuple[RequestPages | None, ...]] = {}
        self.pending = False  # whether the next step has keys to move to their places

    def _set(self, g: int, own: RequestPages) -> None:
        """Replaces the pages of group g."""
        self._own[g] = own
        self._views.clear()

    def adopt(self, g: int, pages: Sequence[int], first_pos: int) -> None:
        """Starts group g with cached `pages`, for positions from `first_pos` on, and holds them."""
        pool = self.pools[g]
        if pool is None or len(self._own[g].page_ids) or first_pos % self.specs[g].page_size:
            rule = "an empty table adopts whole cached pages"
            raise RuleError(rule, f"group {g} from {first_pos}", "Adopt before you reserve")
        pool.share(pages)
        self._set(g, RequestPages(ints(pages), first_pos))

    def merge(self, g: int, begin: int, end: int, pages: list[int]) -> list[int]:
        """Replaces the request's pages at the end of positions [begin, end) with the cached `pages`
        and gives its own back. Returns its pages of the range before these: the tree lacks them."""
        pool, size, (page_ids, first, _, _) = self.pools[g], self.specs[g].page_size, self._own[g]
        at, until = (max(0, p - first) // size for p in (begin, end))
        own: list[int] = page_ids[at:until].tolist()
        alone = len(own) - min(len(own), len(pages))
        duplicates, cached = own[alone:], pages[len(pages) - len(own) + alone :]
        if pool is not None and duplicates != cached:
            pool.share(cached)
            pool.give(duplicates)
            merged = page_ids.copy()
            merged[at + alone : until] = cached
            self._set(g, self._own[g]._replace(page_ids=freeze(merged)))
        return own[:alone]

    def reserve(self, kv_len: int, nodes: int = 0, cross_len: int = 0) -> None:
        """Takes the pages that these lengths still need, in all groups or in none (OutOfPages)."""
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
            own = self._own[g]
            page_ids = append(own.page_ids, got[:pages])
            scratch_ids = append(own.scratch, got[pages:])
            self._set(g, RequestPages(page_ids, own.first_pos, scratch_ids, own.moves))

    def needs(self, kv_len: int, nodes: int = 0) -> list[int]:
        """Returns the number of pages, per group, that such a `reserve` would take."""
        return [sum(self._need(g, kv_len, nodes, 0)) for g in range(len(self.specs))]

    def room(self, g: int, more_pages: int = 0) -> int:
        """Returns the kv_len that group g's pages and `more_pages` more would cover."""
        own = self._own[g]
        return own.first_pos + (len(own.page_ids) + more_pages) * self.specs[g].page_size

    def _need(self, g: int, kv_len: int, nodes: int, cross_len: int) -> tuple[int, int]:
        spec = self.specs[g]
        if self.pools[g] is None:
            return 0, 0
        if spec.layout is Layout.CROSS:
            kv_len, nodes = cross_len, 0
        pages = pages_for(kv_len - self.room(g), spec)
        scratch = pages_for(nodes, spec) - len(self._own[g].scratch)
        return max(0, pages), max(0, scratch)

    def release(self, committed_len: int) -> None:
        """Gives back pages that no row from `committed_len` on sees."""
        for g, pool in self.groups.cached:
            spec, (page_ids, first, scratch, moves) = self.specs[g], self._own[g]
            hidden_len = keep_from(spec, self._len(g, committed_len)) - first
            count = min(len(page_ids), hidden_len // spec.page_size)
            if count > 0:
                first += count * spec.page_size
                self._set(g, RequestPages(page_ids[count:], first, scratch, moves))
                pool.give(page_ids[:count].tolist())

    def fork(self, committed_len: int) -> "PageTable":
        """Returns a second continuation of the first `committed_len` keys: whole pages are shared,
        the partial last one is moved to a new page, and held until then in case the parent ends."""
        if self.pending:
            rule = "a request is forked when its keys are in place"
            raise RuleError(rule, "moves still pending", "Fork after the step that makes them")
        child = PageTable(self.groups)
        child.draft_len, child.draft_state = self.draft_len, self.draft_state
        for g, _ in self.groups.cached:
            (page_ids, first, _, _), length = self._own[g], self._fork_len(g, committed_len)
            whole = shared_pages(self.specs[g], page_ids.tolist(), first, length)
            child.adopt(g, whole, first)
        try:
            child.reserve(committed_len)
        except Exception:
            child.close()
            raise
        for g, pool in self.groups.cached:
            size, end = self.specs[g].page_size, self._fork_len(g, committed_len)
            begin = max(end // size * size, self._own[g].first_pos)
            if begin < end:
                positions = np.arange(begin, end, dtype=np.int32)
                sources = self.slots(g, positions)
                child.move(g, sources, positions)
                child._sources[g] = [int(sources[0]) // size]
                pool.share(child._sources[g])
        return child

    def move(self, g: int, sources: Ints, positions: Ints) -> None:
        """Has the next step move the keys in slots `sources` to those of `positions`."""
        moves = np.stack((sources, self.slots(g, positions)), 1)
        self._set(g, self._own[g]._replace(moves=append(self._own[g].moves, moves)))
        self.pending = self.pending or len(moves) > 0

    def _fork_len(self, g: int, committed_len: int) -> int:
        """Returns the keys of group g that a fork sees: of an encoder, which is read only, all."""
        if self.specs[g].layout is Layout.CROSS:
            return self.room(g)
        return self._len(g, committed_len)

    def _len(self, g: int, committed_len: int) -> int:
        """Returns the keys of group g that exist when `committed_len` are committed."""
        return min(committed_len, self.draft_len) if g in self.groups.drafts else committed_len

    def fork_needs(self, committed_len: int) -> list[int]:
        """Returns the number of pages, per group, that a fork would take."""
        needs = [0] * len(self.specs)
        for g in self.groups.stored:
            shared = self._fork_len(g, committed_len) // self.specs[g].page_size
            needs[g] = pages_for(committed_len, self.specs[g]) - shared
        return needs

    def accept(self, committed_len: int, nodes: Sequence[int]) -> None:
        """Commits the accepted path `nodes`: its keys move from scratch to their positions before
        the next step's write. A draft model computes its keys again instead."""
        positions = committed_len + np.arange(len(nodes), dtype=np.int32)
        for g in self.groups.stored:
            if g not in self.groups.drafts:
                self.move(g, build.node_slots(self.specs[g], self._own[g], ints(nodes)), positions)

    def held(self, g: int) -> list[int]:
        """Returns the pages of group g that this table holds, one entry per hold."""
        return [*self._own[g].page_ids.tolist(), *self._own[g].scratch.tolist(), *self._sources[g]]

    def pages(self, g: int) -> RequestPages | None:
        """Returns the request's pages in group g as a plan takes them; None if it is not cached."""
        return self._own[g] if self.pools[g] is not None else None

    def views(self, groups: tuple[int, ...]) -> tuple[RequestPages | None, ...]:
        """Returns `pages` of several groups: the same object until something changes."""
        if groups not in self._views:
            self._views[groups] = tuple([self.pages(g) for g in groups])
        return self._views[groups]

    def clear_moves(self, groups: Sequence[int] | None = None) -> None:
        """Clears the moves of these groups, or of all: a step has carried them out."""
        for g, pool in self.groups.cached if self.pending else ():
            if groups is None or g in groups:
                pool.give(self._sources[g])
                self._sources[g] = []
                self._set(g, self._own[g]._replace(moves=NO_MOVES))
        self.pending = self.pending and any(len(own.moves) for own in self._own)

    def drop_scratch(self) -> None:
        """Gives scratch pages back, once a plain step that follows the tree's moves is launched."""
        for g, pool in self.groups.cached:
            if len(self._own[g].scratch):
                pool.give(self._own[g].scratch.tolist())
                self._set(g, self._own[g]._replace(scratch=NO_PAGES))

    def slots(self, g: int, positions: Ints) -> Ints:
        """Returns the slots of this request's positions in group g's pool."""
        page_ids, first, _, _ = self._own[g]
        table, size = (page_ids, np.zeros(2, np.int32), ints([first])), self.specs[g].page_size
        return np.asarray(address.paged(*table, size, 0, positions), np.int32)

    def close(self) -> None:
        """Gives all pages back."""
        for g, pool in self.groups.cached:
            pool.give(self.held(g))
        self._empty()


def pages_for(keys: int, spec: GroupSpec) -> int:
    return -(-keys // spec.page_size)


def peak_pages(spec: GroupSpec, keys: int, step_len: int, requests: int = 1) -> int:
    """Returns the most pages that `requests` with `keys` keys in all hold if a step adds at most
    `step_len` rows. With a window, one that grows by s rows from c on holds [keep_from(c), c + s):
    at most (window - 1 + s + page_size - 2) // page_size + 1 pages."""
    if spec.window is None:
        return pages_for(keys, spec)
    slots = requests * (spec.window + 2 * spec.page_size - 3) + step_len
    return min(pages_for(keys, spec), slots // spec.page_size)


def keep_from(spec: GroupSpec, committed_len: int) -> int:
    """Returns the first position that the next row, at `committed_len`, can see."""
    return max(0, committed_len - spec.window + 1) if spec.window is not None else 0


def shared_pages(spec: GroupSpec, pages: list[int], first_pos: int, length: int) -> list[int]:
    """Returns a parent's pages wholly below `length`: only these may be shared by two requests."""
    return pages[: max(0, length - first_pos) // spec.page_size]
