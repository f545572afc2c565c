"""The prefix cache: a radix tree over token ids, whose nodes hold pages of every group.

A node is one block of `unit` tokens, the least common multiple of the page sizes, so that it owns
whole pages in every group; window groups may have lost the first of them, or all. Children are
found by the ids themselves: equal hashes are not enough. Pages that requests hold and locked nodes
are not evicted; the least recently used go first.

Knows tokens and pages, no request: the scheduler calls `match` once, `insert` as it commits."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.kv.tables import CacheGroups, PageTable, keep_from
from lockstep.types import OUR_BUG, RuleError

Ids = tuple[int, ...]
HELD = "every hold has a holder"  # the rule that a leaked page breaks


class Root(NamedTuple):
    """What keys depend on besides the tokens before them. No pages are shared across roots."""

    tenant: str = ""
    encoder_ids: Ids = ()
    draft: bool = False

    @property
    def ahead(self) -> int:
        """Tokens after a block that its keys depend on too: a draft's key at i uses token i+1."""
        return int(self.draft)


class Node:
    """Positions [end - unit, end) of one path of tokens, and their last pages per group; none in a
    draft model's groups if the root has no draft. Roots have end 0; their parent is the top node,
    which is its own parent."""

    __slots__ = ("children", "end", "key", "locks", "pages", "parent", "root")

    def __init__(self, parent: "Node | None", key: Ids | Root, end: int, groups: int) -> None:
        self.parent, self.key, self.end = parent or self, key, end
        self.root: Root = key if isinstance(key, Root) else self.parent.root
        self.pages: list[list[int]] = [[] for _ in range(groups)]
        self.children: dict[Ids | Root, Node] = {}
        self.locks = 0  # requests whose keys are in the tree up to this node


class Prefix:
    """`match` a prefix into an empty table, `insert` committed blocks, `evict` for more pages. From
    `match` until `close` a request locks the node up to which its keys are in the tree."""

    def __init__(self, groups: CacheGroups) -> None:
        self.specs, self.pools, self.drafts = groups.specs, groups.pools, groups.drafts
        self.groups = {g: pool for g, pool in groups.cached if g in groups.stored}
        self.unit = math.lcm(*(self.specs[g].page_size for g in self.groups))
        self._top = Node(None, Root(), 0, len(self.specs))
        self._top.locks = 1  # never removed
        # nodes with pages, least recently used first
        self._order: dict[int, OrderedDict[Node, None]] = {g: OrderedDict() for g in self.groups}

    def match(
        self, root: Root, ids: Sequence[int], table: PageTable, limit: int | None = None
    ) -> Node:
        """Gives `table` the pages of the longest usable prefix of `ids`, at most `limit` long, and
        returns its node, locked. The last token is never matched: its logits must be computed."""
        top = self._child(self._top, root, 0)
        last = len(ids) - 1 if limit is None else min(limit, len(ids) - 1)
        end = self._longest(top, root.ahead, ids, last)
        for g in self._groups_of(top):
            self._hand_over(end, g, table)
        self._touch(end)
        return self.lock(end)

    def insert(self, node: Node, ids: Sequence[int], table: PageTable, committed_len: int) -> Node:
        """Makes the whole blocks below `committed_len` matchable; moves the lock from `node` to the
        last, and returns it. The table takes the tree's pages, and the tree those that it lacks."""
        if table.pending:
            rule = "only keys that are in place are cached"
            raise RuleError(rule, "moves still pending", "Insert after the step that makes them")
        node.locks -= 1
        ahead = node.root.ahead
        while (end := node.end + self.unit) <= committed_len and end + ahead <= len(ids):
            node = self._child(node, tuple(ids[node.end : end + ahead]), end)
            for g in self.groups:
                self._merge(node, g, table)
        return self.lock(node)

    def lock(self, node: Node) -> Node:
        """Adds a request's lock to `node` and returns it."""
        node.locks += 1
        return node

    def close(self, node: Node) -> None:
        """Removes a request's lock. Its blocks stay, as the most recently used."""
        node.locks -= 1
        self._touch(node)
        self._prune(node)

    def available(self, g: int) -> int:
        """Returns how many pages of group g are free, or evictable: held by the tree alone."""
        pool = self.pools[g]
        return pool.free + pool.idle if pool is not None else 0

    def make_room(self, needs: Sequence[int]) -> bool:
        """Evicts until each group g has `needs[g]` free pages, or evicts nothing: returns False."""
        if any(need > self.available(g) for g, need in enumerate(needs)):
            return False
        for g, pool in self.groups.items():
            if needs[g] > pool.free:
                self.evict(g, needs[g] - pool.free)
        return True

    def evict(self, g: int, count: int) -> int:
        """Frees `count` or more pages of group g if possible, oldest first. Returns how many."""
        pool, order = self.groups[g], self._order[g]
        before, passed = pool.free, 0
        while pool.free - before < count and passed < len(order):
            node = next(iter(order))
            passed = 0 if self._drop(node, g) else passed + 1
            if node in order:
                order.move_to_end(node)  # in use, or an ancestor of a node in use: not the oldest
        return pool.free - before

    def check(self, tables: Iterable[PageTable] = ()) -> None:
        """Raises unless free + cached + held = all: every hold is the tree's or that of one of all
        `tables`, and the tree's orders, kept pages and links agree."""
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
            wrong = np.flatnonzero(holds != pool.refs)[:8]
            if len(wrong):
                got = f"group {g}, pages {wrong}: {pool.refs[wrong]} holds, {holds[wrong]} holders"
                raise RuleError(HELD, got, OUR_BUG)
            order = set(self._order.get(g, ()))
            marks = np.bincount(np.array(kept, np.int64), minlength=pool.num_pages)
            if order != {n for n in nodes if n.pages[g]} or (marks != pool.tree_refs).any():
                kept_pages = f"{len(kept)} pages in nodes, {pool.tree_refs.sum()} kept"
                got = f"group {g}: {kept_pages}, {len(order)} of {len(nodes)} nodes ordered"
                raise RuleError("tree_refs and LRU order match the nodes", got, OUR_BUG)
            lens = {len(n.pages[g]) for n in nodes if n.end and g in self._groups_of(n)}
            spec = self.specs[g]
            if spec.window is None and lens - {self.unit // spec.page_size}:
                raise RuleError("only a window loses pages", f"group {g}", OUR_BUG)
        if any(map(self._is_prunable, nodes)):
            raise RuleError("unmatchable leaves are removed", "one still in the tree", OUR_BUG)

    def _child(self, node: Node, key: Ids | Root, end: int) -> Node:
        if key not in node.children:
            node.children[key] = Node(node, key, end, len(self.specs))
        return node.children[key]

    def _longest(self, top: Node, ahead: int, ids: Sequence[int], last: int) -> Node:
        """Returns the deepest usable node up to `last`: its windows [end-w+1, end) have no gaps."""
        best = node = top
        # per window group, the position from which on to the node's end no page is missing
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
        """Returns the groups in which nodes below the node's root have pages."""
        return [g for g in self.groups if node.root.draft or g not in self.drafts]

    def _hand_over(self, end: Node, g: int, table: PageTable) -> None:
        """Gives `table` the pages that a row at `end.end` can see: all, or those of the window."""
        size, node, pages = self.specs[g].page_size, end, list[int]()  # last page first
        first = keep_from(self.specs[g], end.end) // size * size
        while node.end > first:
            count = (node.end - max(first, node.parent.end)) // size
            pages += node.pages[g][: -count - 1 : -1]
            node = node.parent
        table.adopt(g, pages[::-1], first)

    def _merge(self, node: Node, g: int, table: PageTable) -> None:
        """Replaces the table's duplicates with the tree's pages; the tree adopts what it lacked."""
        have = node.pages[g]
        missing = table.merge(g, node.end - self.unit, node.end, have)
        if missing:
            self.groups[g].keep(missing)
            node.pages[g] = missing + have
            self._order[g][node] = None
            if have:
                self._order[g].move_to_end(node)

    def _touch(self, end: Node) -> None:
        """Marks `end` and its ancestors as just used, parents last; a window's only where seen."""
        keep, node = {g: keep_from(self.specs[g], end.end) for g in self.groups}, end
        while node.end:
            for g, order in self._order.items():
                if node.end > keep[g] and node.pages[g]:
                    order.move_to_end(node)
            node = node.parent

    def _drop(self, node: Node, g: int) -> bool:
        """Removes an unlocked leaf, or else drops a window's pages up to the last idle one."""
        if not node.children and not node.locks:
            self._remove(node)
            self._prune(node.parent)
            return True
        if self.specs[g].window is None:
            return False
        pool, pages = self.groups[g], node.pages[g]
        idle = [k for k, page in enumerate(pages, 1) if pool.refs[page] == pool.tree_refs[page]]
        self._drop_pages(node, g, max(idle, default=0))  # and all pages before it
        return bool(idle)

    def _drop_pages(self, node: Node, g: int, count: int) -> None:
        """Removes the first `count` pages of a node's group g from the tree."""
        gone, node.pages[g] = node.pages[g][:count], node.pages[g][count:]
        self.groups[g].drop(gone)
        if not node.pages[g]:
            self._order[g].pop(node, None)

    def _remove(self, node: Node) -> None:
        for g in self.groups:
            self._drop_pages(node, g, len(node.pages[g]))
        del node.parent.children[node.key]

    def _prune(self, node: Node) -> None:
        """Removes leaves at which no match can end, from `node` upwards."""
        while self._is_prunable(node):
            self._remove(node)
            node = node.parent

    def _is_prunable(self, node: Node) -> bool:
        if node.children or node.locks:
            return False
        seen = [g for g in self._groups_of(node) if keep_from(self.specs[g], node.end) < node.end]
        return any(not node.pages[g] for g in seen) or not any(node.pages)
