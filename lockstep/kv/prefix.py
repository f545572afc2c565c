"""The prefix cache: a radix tree over token ids, whose nodes hold pages of every group.

A node is one block of `unit` tokens, the least common multiple of the page sizes, so that it owns
whole pages in every group; window groups may have lost the first of them, or all. Children are
found by the ids themselves: equal hashes are not enough. A page that a request holds too is not
evicted, nor a node where a request is; the least recently used goes first.

Knows tokens and pages, no request: the scheduler calls `match` at its first step, then `insert`.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.kv.tables import CacheGroups, PageTable, keep_from
from lockstep.types import OUR_BUG, RuleError

Ids = tuple[int, ...]


class Root(NamedTuple):
    """What keys depend on besides the tokens before them: requests share nothing across roots."""

    tenant: str = ""
    encoder_ids: Ids = ()
    draft: bool = False

    @property
    def ahead(self) -> int:
        """Tokens after a block that its keys depend on: a draft's key at i is of token i+1 too."""
        return int(self.draft)


class Node:
    """The positions [end - unit, end) behind one path of tokens, and their last pages per group,
    but for a draft's groups where the root has no draft. At end 0 stand the roots, below the top,
    which is its own parent."""

    __slots__ = ("children", "end", "key", "locks", "pages", "parent", "root")

    def __init__(self, parent: "Node | None", key: Ids | Root, end: int, groups: int) -> None:
        self.parent, self.key, self.end = parent or self, key, end
        self.root: Root = key if isinstance(key, Root) else self.parent.root
        self.pages: list[list[int]] = [[] for _ in range(groups)]
        self.children: dict[Ids | Root, Node] = {}
        self.locks = 0  # requests that are here


class Prefix:
    """`match` a prefix into an empty table, `insert` committed blocks, `evict` for more pages. How
    far a request's keys are in the tree is a locked node, from `match` until `close`."""

    def __init__(self, groups: CacheGroups) -> None:
        self.specs, self.pools, self.drafts = groups.specs, groups.pools, groups.drafts
        self.groups = {g: pool for g, pool in groups.cached if g in groups.stored}
        self.unit = math.lcm(*(self.specs[g].page_size for g in self.groups))
        self._top = Node(None, Root(), 0, len(self.specs))
        self._top.locks = 1  # and stays
        # nodes with pages, oldest first
        self._order: dict[int, OrderedDict[Node, None]] = {g: OrderedDict() for g in self.groups}

    def match(
        self, root: Root, ids: Sequence[int], table: PageTable, limit: int | None = None
    ) -> Node:
        """Gives `table` the pages of the longest usable prefix of `ids`, at most `limit` long. The
        last token is never matched: somebody has to compute it."""
        top = self._child(self._top, root, 0)
        last = len(ids) - 1 if limit is None else min(limit, len(ids) - 1)
        end = self._longest(top, root.ahead, ids, last)
        for g in self._groups_of(top):
            self._hand_over(end, g, table)
        self._touch(end)
        return self.lock(end)

    def insert(self, node: Node, ids: Sequence[int], table: PageTable, committed_len: int) -> Node:
        """Makes the whole blocks below `committed_len` matchable, and returns the last. Where the
        tree has a page already, the table takes that one; what the tree lost it adopts."""
        if table.pending:
            rule = "only keys that are in place are cached"
            raise RuleError(rule, "moves still pending", "Insert after the step that carries them")
        node.locks -= 1
        ahead = node.root.ahead
        while (end := node.end + self.unit) <= committed_len and end + ahead <= len(ids):
            node = self._child(node, tuple(ids[node.end : end + ahead]), end)
            for g in self.groups:
                self._merge(node, g, table)
        return self.lock(node)

    def lock(self, node: Node) -> Node:
        """One request more is here."""
        node.locks += 1
        return node

    def close(self, node: Node) -> None:
        """The request left: its blocks stay, as the most recently used."""
        node.locks -= 1
        self._touch(node)
        self._prune(node)

    def available(self, g: int) -> int:
        """Pages of group g that could be taken if all that only the tree holds were evicted."""
        pool = self.pools[g]
        return pool.free + pool.idle if pool is not None else 0

    def make_room(self, needs: Sequence[int]) -> bool:
        """Evicts until `needs[g]` pages are free in every group; if that cannot be, nothing."""
        if any(need > self.available(g) for g, need in enumerate(needs)):
            return False
        for g, pool in self.groups.items():
            if needs[g] > pool.free:
                self.evict(g, needs[g] - pool.free)
        return True

    def evict(self, g: int, count: int) -> int:
        """Frees `count` pages of group g or more, if it can, the oldest first. Returns how many."""
        pool, order = self.groups[g], self._order[g]
        before, passed = pool.free, 0
        while pool.free - before < count and passed < len(order):
            node = next(iter(order))
            passed = 0 if self._drop(node, g) else passed + 1
            if node in order:
                order.move_to_end(node)  # in use, or above what is in use: not the oldest after all
        return pool.free - before

    def check(self, tables: Iterable[PageTable] = ()) -> None:
        """free + cached + held = all: every hold is the tree's or that of one of all `tables`, and
        the tree's orders, marks and links tell one story."""
        tables, nodes = list(tables), [self._top]
        for node in nodes:  # grows while it is read
            nodes += node.children.values()
        for g, pool in enumerate(self.pools):
            if pool is None:
                continue
            pool.check()
            kept = [page for node in nodes for page in node.pages[g]]
            held = [page for table in tables for page in table.held(g)]
            holds = np.bincount([0, *kept, *held], minlength=pool.num_pages)
            if not np.array_equal(holds, pool.refs):
                wrong = np.flatnonzero(holds != pool.refs)[:8]
                counts = f"{pool.refs[wrong]} holds, {holds[wrong]} known holders"
                got = f"group {g}, pages {wrong}: {counts}"
                raise RuleError("every hold has a holder", got, OUR_BUG)
            order = set(self._order.get(g, ()))
            marks = np.bincount(np.array(kept, np.int64), minlength=pool.num_pages)
            if order != {n for n in nodes if n.pages[g]} or (marks != pool.kept).any():
                found = f"group {g}: {len(kept)} pages in {len(nodes)} nodes"
                got = f"{found}, {int(pool.kept.sum())} kept, {len(order)} ordered"
                raise RuleError("a node's pages are kept and ordered", got, OUR_BUG)
            lens = {len(n.pages[g]) for n in nodes if n.end and g in self._groups_of(n)}
            spec = self.specs[g]
            if spec.window is None and lens - {self.unit // spec.page_size}:
                raise RuleError("only a window loses pages", f"group {g}", OUR_BUG)
        if any(map(self._useless, nodes)):
            raise RuleError("a leaf that cannot be matched is removed", "one that is not", OUR_BUG)

    def _child(self, node: Node, key: Ids | Root, end: int) -> Node:
        if key not in node.children:
            node.children[key] = Node(node, key, end, len(self.specs))
        return node.children[key]

    def _longest(self, top: Node, ahead: int, ids: Sequence[int], last: int) -> Node:
        """The deepest node, ending at or below `last`, whose windows [end-w+1, end) are whole."""
        best = node = top
        # per window group, from where on to the end of the node its pages are all there
        since = {g: 0 for g in self._groups_of(top) if self.specs[g].window is not None}
        while node.end + self.unit <= last:
            child = node.children.get(tuple(ids[node.end : node.end + self.unit + ahead]))
            if child is None:
                break
            node = child
            for g in since:
                begin = node.end - len(node.pages[g]) * self.specs[g].page_size
                if begin > node.end - self.unit:
                    since[g] = begin
            if all(begin <= keep_from(self.specs[g], node.end) for g, begin in since.items()):
                best = node
        return best

    def _groups_of(self, node: Node) -> list[int]:
        """Where such nodes have pages."""
        return [g for g in self.groups if node.root.draft or g not in self.drafts]

    def _hand_over(self, end: Node, g: int, table: PageTable) -> None:
        """The table gets what a row at `end.end` can see: all pages, or those of the window."""
        size, node, pages = self.specs[g].page_size, end, list[int]()  # the last one first
        first = keep_from(self.specs[g], end.end) // size * size
        while node.end > first:
            count = (node.end - max(first, node.parent.end)) // size
            pages += node.pages[g][: -count - 1 : -1]
            node = node.parent
        table.adopt(g, pages[::-1], first)

    def _merge(self, node: Node, g: int, table: PageTable) -> None:
        """The tree's pages stay, the table's duplicates go, what it alone has is the tree's too."""
        have = node.pages[g]
        missing = table.merge(g, node.end - self.unit, node.end, have)
        if missing:
            self.groups[g].keep(missing)
            node.pages[g] = missing + have
            self._order[g][node] = None
            if have:
                self._order[g].move_to_end(node)

    def _touch(self, end: Node) -> None:
        """Used now, parents last, as the youngest; of a window group only what a row here sees."""
        keep, node = {g: keep_from(self.specs[g], end.end) for g in self.groups}, end
        while node.end:
            for g, order in self._order.items():
                if node.end > keep[g] and node.pages[g]:
                    order.move_to_end(node)
            node = node.parent

    def _drop(self, node: Node, g: int) -> bool:
        """Lets go, for group g, of an unlocked leaf, or else of pages that no request holds."""
        if not node.children and not node.locks:
            self._remove(node)
            self._prune(node.parent)
            return True
        if self.specs[g].window is None:
            return False
        pool, pages = self.groups[g], node.pages[g]
        idle = [k for k, page in enumerate(pages, 1) if pool.refs[page] == pool.kept[page]]
        self._lose(node, g, max(idle, default=0))  # and what lies before them
        return bool(idle)

    def _lose(self, node: Node, g: int, count: int) -> None:
        """The first `count` pages of a node leave the tree."""
        gone, node.pages[g] = node.pages[g][:count], node.pages[g][count:]
        self.groups[g].drop(gone)
        if not node.pages[g]:
            self._order[g].pop(node, None)

    def _remove(self, node: Node) -> None:
        for g in self.groups:
            self._lose(node, g, len(node.pages[g]))
        del node.parent.children[node.key]

    def _prune(self, node: Node) -> None:
        """Leaves where no match can end are of no use: out with them, from here upwards."""
        while self._useless(node):
            self._remove(node)
            node = node.parent

    def _useless(self, node: Node) -> bool:
        if node.children or node.locks:
            return False
        seen = [g for g in self._groups_of(node) if keep_from(self.specs[g], node.end) < node.end]
        return any(not node.pages[g] for g in seen) or not any(node.pages)
