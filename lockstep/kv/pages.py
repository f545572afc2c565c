"""Pages with reference counts: who may still need a page.

Page 0 is the null page: padding lives there, it is never handed out. A page is free, or held
`refs[page]` times, `kept[page]` of them by the prefix tree; if only by that, it is idle. Host only.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lockstep.types import OUR_BUG, OutOfPages, RuleError

NULL_PAGE = 0


class PagePool:
    """`take` fresh pages or one more hold on given ones, `give` holds back."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            rule = "a pool has the null page and at least one more"
            raise RuleError(rule, str(num_pages), "Give the cache more memory")
        self.num_pages = num_pages
        self.refs = np.zeros(num_pages, np.int32)
        self.refs[NULL_PAGE] = 1
        self.kept = np.zeros(num_pages, np.int32)
        self.idle = 0  # pages that nobody but the tree holds
        # the same numbers: one of them is read much faster this way
        self._holds, self._kept = self.refs.data, self.kept.data
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages that nobody holds, each held once now; all or none."""
        if count > len(self._free):
            rule = f"{len(self._free)} of {self.num_pages - 1} pages are free"
            got = f"a request for {count}"
            raise OutOfPages(rule, got, "Free some, or give the cache more memory")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holds[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more hold on each page; each must be held already."""
        holds = self._holds
        for page in pages:
            if holds[page] < 1 or page == NULL_PAGE:
                got = f"page {page} with {holds[page]} holds"
                raise RuleError("only a held page can be shared", got, "Take it first")
            self.idle -= holds[page] == self._kept[page]
            holds[page] += 1

    def give(self, pages: Iterable[int]) -> list[int]:
        """One hold fewer on each page; returns those that nobody holds any more: they are free."""
        freed, holds = [], self._holds
        for page in pages:
            if holds[page] < 1 or page == NULL_PAGE:
                rule = "a page is given back once per hold"
                raise RuleError(rule, f"page {page} with {holds[page]} holds", "Check who holds it")
            holds[page] -= 1
            if holds[page] == 0:
                freed.append(page)
            elif holds[page] == self._kept[page]:
                self.idle += 1
        self._free += freed
        return freed

    def keep(self, pages: Sequence[int]) -> None:
        """The tree's hold on pages that somebody holds."""
        self.share(pages)
        for page in pages:
            self._kept[page] += 1
            self.idle += self._holds[page] == self._kept[page]

    def drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            if self._kept[page] < 1:
                raise RuleError("the tree drops what it keeps", f"page {page}", OUR_BUG)
            self.idle -= self._holds[page] == self._kept[page]
            self._kept[page] -= 1
        self.give(pages)

    def check(self) -> None:
        """free + held = all, no page is both, and the idle ones are counted right."""
        held = int(np.count_nonzero(self.refs)) - 1
        idle = int(np.count_nonzero((self.kept > 0) & (self.kept == self.refs)))
        if idle != self.idle:
            raise RuleError(f"{idle} pages are idle", f"{self.idle} counted", OUR_BUG)
        both = any(self.refs[page] for page in self._free)
        if both or held + len(set(self._free)) != self.num_pages - 1:
            got = f"{held} held + {len(self._free)} free of {self.num_pages - 1}"
            raise RuleError("every page is free or held, never both", got, OUR_BUG)
