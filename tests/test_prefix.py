"""The prefix cache against a plain model: whatever it returns really contains those tokens' keys,
in every group.

The store stands for the memory: slot -> the path of tokens whose key is there. Free pages are
wiped, so reading one is an error. Each directed test keeps out a bug that another engine's radix
tree, window eviction or page allocator has had.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lockstep.kv.prefix import Node, Prefix, Root
from lockstep.kv.tables import NULL_PAGE, CacheGroups, PagePool, PageTable, keep_from
from lockstep.plan import check as plan_check
from lockstep.plan.build import RequestWork, build
from lockstep.types import AttnSpec, GroupSpec, Layout, OutOfPages, RuleError

FULL = GroupSpec(Layout.DENSE, 4, 2, 8, 8, (AttnSpec(0.5),), page_size=4)
LATENT = GroupSpec(Layout.LATENT, 4, 1, 8, 8, (AttnSpec(0.5),), page_size=2)


def window(w: int, page_size: int) -> GroupSpec:
    return replace(FULL, window=w, page_size=page_size)


@dataclass(eq=False)
class Live:
    """A request of the tests: its first `cached` tokens are committed, the first `written` have
    keys."""

    root: Root
    ids: list[int]
    table: PageTable
    at: Node
    cached: int
    written: int = field(init=False)

    def __post_init__(self) -> None:
        self.written = self.cached


class World:
    """Pools, the tree, and the key in every slot."""

    def __init__(self, specs: tuple[GroupSpec, ...], pages: tuple[int, ...]) -> None:
        self.specs, self.pools = specs, tuple(PagePool(n) for n in pages)
        self.tree = Prefix(CacheGroups(specs, self.pools))
        self.store: list[dict[int, object]] = [{} for _ in specs]
        self.live: list[Live] = []

    def open(self, ids, root: Root = Root(), limit: int | None = None) -> Live:  # noqa: B008 (a frozen value)
        table = PageTable(CacheGroups(self.specs, self.pools))
        at = self.tree.match(root, ids, table, limit)
        self.live.append(Live(root, list(ids), table, at, at.end))
        return self.live[-1]

    def write(self, r: Live, count: int) -> None:
        """Writes the next `count` keys without committing them."""
        end = r.cached + count
        self.tree.make_room(r.table.needs(end))
        r.table.reserve(end)
        for g, store in enumerate(self.store):
            pages = r.table.pages(g)
            values = [store[int(a)] for a, _ in pages.moves]
            store.update(zip(pages.moves[:, 1].tolist(), values, strict=True))
            slots = r.table.slots(g, np.arange(r.cached, end, dtype=np.int32)).tolist()
            store.update(
                (slot, self.key(r, p)) for slot, p in zip(slots, range(r.cached, end), strict=True)
            )
        r.table.clear_moves()
        r.written = end

    def key(self, r: Live, p: int) -> object:
        """Returns what the key at position p depends on."""
        return r.root, tuple(r.ids[: p + 1 + r.root.ahead])

    def commit(self, r: Live) -> None:
        r.cached = r.written
        r.at = self.tree.insert(r.at, r.ids, r.table, r.cached)
        r.table.release(r.cached)
        self.wipe()

    def run(self, ids, root: Root = Root(), chunk: int = 10**6) -> Live:  # noqa: B008
        """Runs a whole request: matches it, then computes it in chunks, except for the tokens after
        the last draft key (`root.ahead`)."""
        r = self.open(ids, root)
        while (left := len(r.ids) - root.ahead - r.cached) > 0:
            self.write(r, min(chunk, left))
            self.commit(r)
        return r

    def close(self, r: Live) -> None:
        self.tree.close(r.at)
        r.table.close()
        self.live.remove(r)
        self.wipe()

    def fork(self, r: Live) -> Live:
        child = Live(
            r.root,
            r.ids[: r.cached + r.root.ahead],
            r.table.fork(r.cached),
            self.tree.lock(r.at),
            r.cached,
        )
        self.live.append(child)
        return child

    def wipe(self) -> None:
        for spec, pool, store in zip(self.specs, self.pools, self.store, strict=True):
            for slot in [slot for slot in store if not pool.refs[slot // spec.page_size]]:
                del store[slot]

    def verify(self) -> None:
        """Checks that every visible slot of every request and every page of the tree has the right
        key, and that every hold has a holder."""
        for r in self.live:
            for g, spec in enumerate(self.specs):
                pending = {b: a for a, b in r.table.pages(g).moves.tolist()}
                seen = np.arange(keep_from(spec, r.cached), r.written, dtype=np.int32)
                slots = r.table.slots(g, seen).tolist()
                assert [self.store[g][pending.get(s, s)] for s in slots] == [
                    self.key(r, int(p)) for p in seen
                ]
        for node, root, ids in self.nodes():
            for g, spec in enumerate(self.specs):
                begin = node.end - len(node.pages[g]) * spec.page_size
                slots = [
                    page * spec.page_size + k
                    for page in node.pages[g]
                    for k in range(spec.page_size)
                ]
                keys = [(root, ids[: p + 1 + root.ahead]) for p in range(begin, node.end)]
                assert [self.store[g][s] for s in slots] == keys
        self.tree.check(r.table for r in self.live)

    def nodes(self) -> list[tuple[Node, Root, tuple[int, ...]]]:
        """Returns all nodes with their roots and the tokens of their paths."""
        found = [(top, root, ()) for root, top in self.tree._top.children.items()]
        for node, root, ids in found:
            found += [
                (child, root, ids[: node.end] + child.key) for child in node.children.values()
            ]
        return found

    def node(self, *ids: int) -> Node:
        return next(node for node, _, path in self.nodes() if path == ids)


class Machine(RuleBasedStateMachine):
    """Requests arrive, compute in two phases, fork and leave; pages are evicted at any moment."""

    specs: tuple[GroupSpec, ...] = (FULL,)
    pages: tuple[int, ...] = (24,)

    def __init__(self) -> None:
        super().__init__()
        self.w = World(self.specs, self.pages)
        self.known: dict[
            Root, set[tuple[int, ...]]
        ] = {}  # the plain model: all paths ever committed
        self.texts: list[list[int]] = [[]]
        self.evicted = False

    def longest(self, root: Root, ids: list[int], limit: int | None) -> int:
        unit, last = self.w.tree.unit, len(ids) - 1 if limit is None else min(limit, len(ids) - 1)
        ends = range(unit, last + 1, unit)
        return max(
            (e for e in ends if tuple(ids[: e + root.ahead]) in self.known.get(root, ())), default=0
        )

    @precondition(lambda self: len(self.w.live) < 5)
    @rule(
        data=st.data(),
        new=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        root=st.integers(0, 2),
        limit=st.sampled_from([None, 0, 9]),
    )
    def open(self, data, new, root, limit) -> None:
        text = data.draw(st.sampled_from(self.texts))
        ids = text[: data.draw(st.integers(0, len(text)))] + new
        key = (Root(), Root("b"), Root(draft=True))[root]
        r = self.w.open(ids, key, limit)
        longest = self.longest(key, ids, limit)
        assert r.cached <= longest if self.evicted else r.cached == longest

    @precondition(
        lambda self: any(r.written == r.cached < len(r.ids) - r.root.ahead for r in self.w.live)
    )
    @rule(data=st.data(), count=st.integers(1, 12))
    def write(self, data, count) -> None:
        r = data.draw(
            st.sampled_from(
                [r for r in self.w.live if r.written == r.cached < len(r.ids) - r.root.ahead]
            )
        )
        count = min(count, len(r.ids) - r.root.ahead - r.cached)
        free = [p.free for p in self.w.pools]
        needs = r.table.needs(r.cached + count)
        possible = all(n <= self.w.tree.available(g) for g, n in enumerate(needs))
        self.evicted |= possible and any(n > f for n, f in zip(needs, free, strict=True))
        try:
            self.w.write(r, count)
            assert possible
        except OutOfPages:
            assert not possible and [p.free for p in self.w.pools] == free
        self.w.wipe()

    @precondition(lambda self: any(r.written > r.cached for r in self.w.live))
    @rule(data=st.data())
    def commit(self, data) -> None:
        r = data.draw(st.sampled_from([r for r in self.w.live if r.written > r.cached]))
        self.w.commit(r)
        self.texts.append(r.ids)
        self.texts = self.texts[-6:]
        unit = self.w.tree.unit
        done = {
            tuple(r.ids[: e + r.root.ahead])
            for e in range(unit, r.cached + 1, unit)
            if e + r.root.ahead <= len(r.ids)
        }
        self.known.setdefault(r.root, set()).update(done)

    @precondition(
        lambda self: any(r.written == r.cached for r in self.w.live) and len(self.w.live) < 5
    )
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def fork(self, data, more) -> None:
        r = data.draw(st.sampled_from([r for r in self.w.live if r.written == r.cached]))
        if r.table.pending:
            return
        try:
            child = self.w.fork(r)
        except OutOfPages:
            return
        child.ids += more

    @precondition(lambda self: self.w.live)
    @rule(data=st.data())
    def close(self, data) -> None:
        self.w.close(data.draw(st.sampled_from(self.w.live)))

    @rule(data=st.data(), count=st.integers(1, 30))
    def evict(self, data, count) -> None:
        g = data.draw(st.sampled_from(sorted(self.w.tree.groups)))
        possible, free = self.w.pools[g].idle, self.w.pools[g].free
        freed = self.w.tree.evict(g, count)
        assert freed == self.w.pools[g].free - free and freed >= min(count, possible)
        self.evicted |= freed > 0
        self.w.wipe()

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        self.w.verify()

    def teardown(self) -> None:
        for r in list(self.w.live):
            self.w.close(r)
        self.w.verify()
        for g, pool in enumerate(self.w.pools):
            self.w.tree.evict(g, pool.num_pages)
            assert pool.free == pool.num_pages - 1
        assert not self.w.tree._top.children


class OnePage(Machine):
    specs, pages = (replace(FULL, page_size=1),), (40,)


class TwoSizes(Machine):
    specs, pages = (FULL, window(6, 2)), (16, 24)


class ThreeWindows(Machine):
    specs, pages = (LATENT, window(9, 4), window(3, 8), window(1, 2)), (36, 16, 10, 30)


class OnlyWindows(Machine):
    specs, pages = (window(5, 2), window(2, 1)), (16, 24)


short = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestOnePage, TestTwoSizes, TestThreeWindows, TestOnlyWindows = (
    m.TestCase for m in (OnePage, TwoSizes, ThreeWindows, OnlyWindows)
)
TestOnePage.settings = TestTwoSizes.settings = TestThreeWindows.settings = (
    TestOnlyWindows.settings
) = short


def ids(n: int, first: int = 10) -> list[int]:
    return list(range(first, first + n))


@pytest.mark.parametrize(("n", "want"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_token_is_always_computed(n, want):
    w = World((FULL,), (20,))
    w.run(ids(12))
    assert w.open(ids(n)).cached == want


def test_a_match_is_a_multiple_of_every_page_size():
    w = World((replace(FULL, page_size=3), LATENT), (20, 20))
    w.run(ids(20))
    assert w.tree.unit == 6
    assert w.open(ids(20)).cached == 18
    w.verify()


def test_keys_are_matched_only_after_their_step():
    w = World((FULL,), (20,))
    r = w.open(ids(9))
    w.write(r, 9)
    assert w.open(ids(9)).cached == 0, "a step that still runs was matched"
    w.commit(r)
    assert w.open(ids(9)).cached == 8


def test_a_limit_of_zero_matches_nothing_but_inserts():
    w = World((FULL,), (20,))
    r = w.open(ids(9), limit=0)
    w.write(r, 9)
    w.commit(r)
    again = w.open(ids(9), limit=0)
    assert again.cached == 0
    assert w.open(ids(9)).cached == 8


def test_equal_hashes_are_not_equal_tokens():
    colliding = 2**61 - 1
    assert hash((colliding,) * 4) == hash((0,) * 4)
    w = World((FULL,), (20,))
    w.run([0] * 5)
    assert w.open([colliding] * 5).cached == 0


def test_a_tombstone_restarts_the_count_of_keys_that_a_window_needs():
    w = World((LATENT, window(5, 2)), (20, 20))
    w.close(w.run(ids(11)))
    for end in (4, 8):
        w.tree._drop_pages(w.node(*ids(end)), 1, 1)
    w.wipe()
    assert w.open(ids(11)).cached == 2, "two short runs of keys were counted as one long one"
    w.verify()


def test_nothing_that_a_running_step_reads_is_evicted():
    w = World((FULL, window(6, 4)), (12, 12))
    r = w.open(ids(30))
    w.write(r, 9)
    w.commit(r)
    w.write(r, 9)  # rows 9..17 are running; the first of them sees back to position 4
    for g in range(2):
        w.tree.evict(g, 100)
    w.wipe()
    w.verify()
    w.commit(r)
    w.verify()


@pytest.mark.parametrize("length", range(4, 14))
def test_whole_pages_are_evicted_and_only_when_no_row_sees_them(length):
    w = World((FULL, window(6, 4)), (12, 12))
    r = w.run(ids(length))
    w.tree.evict(1, 100)
    w.verify()
    assert r.table.pages(1).first_pos == keep_from(w.specs[1], length) // 4 * 4
    assert w.pools[1].num_pages - 1 - w.pools[1].free == len(r.table.held(1))


def test_recovering_a_tombstone_leaves_a_locked_nodes_pages_alone():
    w = World((FULL, window(4, 4)), (20, 20))
    reader = w.run(ids(17))
    w.tree.evict(1, 100)
    before = [list(w.node(*ids(n)).pages[0]) for n in (4, 8, 12, 16)]
    writer = w.open(ids(17), limit=0)
    w.write(writer, 17)
    w.commit(writer)
    assert [w.node(*ids(n)).pages[0] for n in (4, 8, 12, 16)] == before
    assert all(w.node(*ids(n)).pages[1] for n in (4, 8, 12, 16)), "what was lost is adopted"
    assert writer.table.held(0)[:4] == reader.table.held(0)[:4], (
        "a duplicate is given up for the cached page"
    )
    w.verify()
    assert w.open(ids(9)).cached == 8


def test_a_partly_evicted_node_adopts_only_the_pages_it_lacks():
    w = World((FULL, window(6, 2)), (20, 20))
    w.run(ids(9))
    w.tree._drop_pages(w.node(*ids(8)), 1, 1)
    kept = list(w.node(*ids(8)).pages[1])
    writer = w.open(ids(9), limit=0)
    w.write(writer, 9)
    w.commit(writer)
    assert w.node(*ids(8)).pages[1][1:] == kept, (
        "what the tree has stays, and what it lacks comes before it"
    )
    w.verify()


def test_a_leaf_that_cannot_be_matched_is_removed():
    w = World((FULL, window(3, 2)), (20, 40))
    r = w.open(ids(8))
    w.write(r, 4)
    w.commit(r)
    w.write(r, 3)
    w.commit(r)  # the window is past [0, 4): only the tree still has the leaf's last pages
    w.tree.evict(1, 100)
    assert w.node(*ids(4)).pages[1] == []
    w.close(r)
    assert not w.tree._top.children
    assert [p.free for p in w.pools] == [19, 39]


def test_an_unfinished_request_inserts_only_the_pages_it_still_has():
    w = World((FULL, window(3, 1)), (20, 40))
    r = w.open(ids(30))
    for chunk in (3, 3, 3, 2, 4, 7):
        w.write(r, chunk)
        w.commit(r)
        w.verify()
    assert w.open(ids(30)).cached == 20


def test_a_request_and_the_tree_do_not_share_a_list_of_pages():
    w = World((FULL,), (20,))
    w.close(w.run(ids(9)))
    r = w.open(ids(30))
    w.write(r, 20)
    assert len(w.node(*ids(4)).pages[0]) == 1
    assert np.count_nonzero(w.pools[0].tree_refs) == 2
    w.verify()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_match_has_one_length_for_all_window_groups(lost):
    w = World((LATENT, window(3, 2), window(7, 2)), (20, 20, 20))
    w.close(w.run(ids(13)))
    w.tree._drop_pages(w.node(*ids(8)), lost, 1)
    w.wipe()
    r = w.open(ids(13))
    assert r.cached == {1: 12, 2: 6}[lost]
    w.verify()
    w.write(r, 1)
    w.commit(r)
    w.verify()


@pytest.mark.parametrize("length", [8, 9])
def test_a_shared_page_is_never_written(length):
    w = World((FULL,), (40,))
    parent = w.run(ids(length))
    child = w.fork(parent)
    assert child.table.pending == (length % 4 > 0)
    child.ids += [1, 2, 3]
    parent.ids += [4, 5, 6]
    for r in (parent, child, w.open([*ids(8), 7])):
        w.write(r, 1)
        w.verify()
    plan = build(w.specs, [RequestWork(r.cached, 1, (r.table.pages(0),)) for r in w.live])
    plan_check.check(plan, (40,))


def test_a_fork_keeps_the_page_it_is_still_to_copy():
    w = World((FULL,), (40,))
    parent = w.run(ids(6))
    child = w.fork(parent)
    child.ids += [1, 2, 3]
    w.close(parent)
    w.run(ids(30, first=100))
    w.write(child, 1)
    w.commit(child)
    w.verify()


ROOTS = [
    Root(),
    Root("a"),
    Root("ab"),
    Root("a", (1,)),
    Root("a", (1, 2)),
    Root("", (1, 2)),
    Root("", (12,)),
    Root("a", draft=True),
    Root("", (1, 2), True),
]


def test_everything_that_cached_rows_depend_on_is_part_of_the_tree_key():
    w = World((FULL,), (80,))
    for root in ROOTS:
        assert w.open(ids(10), root).cached == 0
        w.live.clear()
        w.run(ids(10), root)
    assert [w.open(ids(10), root).cached for root in ROOTS] == [8] * len(ROOTS)


def test_ids_of_the_encoder_and_of_the_prompt_are_separate_in_the_tree_key():
    w = World((FULL,), (80,))
    w.run([3, 4, 5, 6, 7], Root("", (1, 2)))
    assert w.open([2, 3, 4, 5, 6, 7], Root("", (1,))).cached == 0


def test_a_drafts_last_key_depends_on_the_next_token():
    w = World((FULL,), (20,))
    root = Root(draft=True)
    w.run([*ids(8), 1, 2], root)
    assert w.open([*ids(8), 1, 5], root).cached == 8
    assert w.open([*ids(8), 9, 2], root).cached == 4, (
        "the draft's key at 7 was made from another token 8"
    )
    w.verify()


def test_a_drafts_block_is_inserted_only_when_the_token_after_it_is_known():
    """Without that token in its key nobody would find it, nor what comes below it."""
    w = World((FULL,), (20,))
    root = Root(draft=True)
    r = w.open(ids(8), root)
    r.table.reserve(12)
    r.at = w.tree.insert(r.at, r.ids, r.table, 8)
    assert r.at.end == 4, "token 8 is not known yet"
    r.ids += [1, 2, 3, 4, 5]
    r.at = w.tree.insert(r.at, r.ids, r.table, 12)
    assert r.at.end == 12
    assert w.open(r.ids, root).cached == 12


def test_a_hit_with_a_window_lists_no_page_that_was_not_written():
    w = World((FULL, window(6, 2)), (20, 40))
    w.close(w.run(ids(30)))
    w.tree._drop_pages(w.node(*ids(8)), 1, 2)
    w.wipe()
    r = w.open(ids(30))
    assert r.cached == 28
    assert [r.table.pages(g).first_pos for g in range(2)] == [0, 22]
    assert NULL_PAGE not in r.table.held(1) and len(r.table.held(1)) == 3
    w.write(r, 2)
    w.verify()
    plan = build(w.specs, [RequestWork(28, 2, (r.table.pages(0), r.table.pages(1)))])
    plan_check.check(plan, (20, 40))


def test_the_least_recently_used_block_is_evicted_first_and_a_held_block_never():
    w = World((FULL,), (10,))
    first, second, held = ids(4, 10), ids(4, 20), w.run(ids(4, 30))
    for text in (first, second):
        w.close(w.run([*text, 0]))
    w.close(w.open([*first, 0]))
    assert w.tree.evict(0, 1) == 1
    assert [w.open([*text, 0]).cached for text in (first, second, ids(4, 30))] == [4, 0, 4]
    assert held.table.held(0)[0] in w.node(*ids(4, 30)).pages[0]


def test_room_is_made_in_all_groups_or_in_none():
    w = World((FULL, window(4, 4)), (10, 10))
    w.close(w.run(ids(20)))
    before = [np.count_nonzero(pool.tree_refs) for pool in w.pools]
    assert not w.tree.make_room([9, 10])
    assert [np.count_nonzero(pool.tree_refs) for pool in w.pools] == before
    assert w.tree.make_room([9, 9])
    assert [p.free for p in w.pools] == [9, 9]


def test_a_long_path_of_small_pages_is_removed_without_recursion():
    w = World((replace(FULL, page_size=1), window(2, 1)), (5000, 5000))
    w.close(w.run(ids(4000)))
    w.tree.evict(1, 3998)
    assert w.tree.evict(0, 5000) == 4000
    assert not w.tree._top.children


def test_keys_that_are_still_to_be_moved_are_not_cached():
    w = World((FULL,), (20,))
    child = w.fork(w.run(ids(6)))
    with pytest.raises(RuleError, match="in place"):
        w.tree.insert(child.at, child.ids, child.table, child.cached)


def test_check_finds_a_hold_without_a_holder():
    w = World((FULL,), (20,))
    r = w.run(ids(9))
    with pytest.raises(RuleError, match="every hold has a holder"):
        w.tree.check([])
    w.pools[0].share(r.table.held(0)[:1])
    with pytest.raises(RuleError, match="every hold has a holder"):
        w.tree.check([r.table])


def test_siblings_forked_within_a_block_share_the_smaller_pages_below_it():
    w = World((FULL, window(6, 2)), (20, 20))
    parent = w.open([*ids(3), 1])
    w.write(parent, 3)
    w.commit(parent)
    child = w.fork(parent)
    child.ids.append(2)
    for r in (parent, child):
        w.write(r, 1)
        w.commit(r)
    nodes = w.node(*ids(3), 1), w.node(*ids(3), 2)
    assert nodes[0].pages[1][0] == nodes[1].pages[1][0]
    w.verify()
    w.close(parent)
    w.close(child)
    assert w.pools[1].idle == 3
    assert w.tree.evict(1, 3) == 3
    w.verify()
