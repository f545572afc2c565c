"""Pages, page tables and pools: bookkeeping against a model, exact bytes, and formats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lockstep.kernels.cpu.ops import Ops
from lockstep.kv.pool import KvWriter, Pool, UncachedKv, arithmetic, group_bytes, view
from lockstep.kv.tables import NULL_PAGE, CacheGroups, PagePool, PageTable, keep_from
from lockstep.plan.image import PlanArrays
from lockstep.types import AttnSpec, GroupSpec, Layout, OutOfPages, RuleError

FULL = GroupSpec(
    Layout.DENSE, 4, 2, 8, 8, (AttnSpec(0.5), AttnSpec(0.5, k_scale=2.0, v_scale=0.5)), page_size=4
)
WINDOW = replace(FULL, window=6, page_size=2)


def test_pages_are_taken_all_or_none_and_the_null_page_never():
    pool = PagePool(4)
    assert NULL_PAGE not in pool.take(3)
    with pytest.raises(OutOfPages, match="0 of 3 pages are free; got a request for 1"):
        pool.take(1)


def test_a_page_is_given_back_once_per_hold():
    pool = PagePool(4)
    pages = pool.take(1)
    pool.share(pages)
    assert pool.give(pages) == []
    assert pool.give(pages) == pages
    with pytest.raises(RuleError, match="once per hold"):
        pool.give(pages)
    with pytest.raises(RuleError, match="only a held page"):
        pool.share(pages)


def test_a_reservation_that_fails_in_one_group_takes_nothing_from_any():
    pools = [PagePool(64), PagePool(3)]
    table = PageTable(CacheGroups((FULL, WINDOW), pools))
    with pytest.raises(OutOfPages):
        table.reserve(20)
    assert [p.free for p in pools] == [63, 2]


def test_a_table_needs_the_pages_a_reservation_takes_and_none_for_an_unnamed_encoder():
    cross = replace(FULL, layout=Layout.CROSS, causal=False)
    pools = [PagePool(64) for _ in range(3)]
    table = PageTable(CacheGroups((FULL, WINDOW, cross), pools))
    for kv_len, nodes in ((1, 0), (9, 0), (12, 5), (20, 6)):
        before, needs = [p.free for p in pools], table.needs(kv_len, nodes)
        table.reserve(kv_len, nodes)
        assert needs == [was - pool.free for was, pool in zip(before, pools, strict=True)]
        assert needs[2] == 0


class Requests(RuleBasedStateMachine):
    """Page tables against a plain model, which knows the token of each request at each position in
    each group."""

    def __init__(self) -> None:
        super().__init__()
        self.specs = (FULL, WINDOW)
        self.pools = [PagePool(40), PagePool(60)]
        self.slots: list[dict[int, int]] = [{}, {}]  # per group: slot -> token
        self.live: dict[int, tuple[PageTable, list[int]]] = {}
        self.names = iter(range(1000))
        self.tokens = iter(range(1, 10**6))

    def carry_moves(self, table: PageTable) -> None:
        for g, slots in enumerate(self.slots):
            moves = table.pages(g).moves
            values = [slots[int(a)] for a, _ in moves]
            for (_, to), value in zip(moves, values, strict=True):
                slots[int(to)] = value
        table.clear_moves()

    @precondition(lambda self: len(self.live) < 6)
    @rule()
    def open(self) -> None:
        self.live[next(self.names)] = (PageTable(CacheGroups(self.specs, self.pools)), [])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 9))
    def extend(self, data, n) -> None:
        table, tokens = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        free = [p.free for p in self.pools]
        try:
            table.reserve(len(tokens) + n)
        except OutOfPages:
            assert [p.free for p in self.pools] == free
            return
        new = [next(self.tokens) for _ in range(n)]
        for g in range(2):
            at = table.slots(g, np.arange(len(tokens), len(tokens) + n, dtype=np.int32))
            self.slots[g].update(zip(at.tolist(), new, strict=True))
        tokens += new
        table.release(len(tokens))

    @precondition(lambda self: self.live and len(self.live) < 6)
    @rule(data=st.data(), back=st.integers(0, 5))
    def fork(self, data, back) -> None:
        table, tokens = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        length = max(len(tokens) - back, 0)
        if keep_from(WINDOW, length) < table.pages(1).first_pos:
            return  # the window group has dropped pages that this fork would see
        free = [p.free for p in self.pools]
        try:
            child = table.fork(length)
        except OutOfPages:
            assert [p.free for p in self.pools] == free
            return
        self.carry_moves(child)
        self.live[next(self.names)] = (child, tokens[:length])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data) -> None:
        table, _ = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        table.close()

    @invariant()
    def every_request_finds_its_own_tokens(self) -> None:
        for table, tokens in self.live.values():
            for g, spec in enumerate(self.specs):
                seen = np.arange(keep_from(spec, len(tokens)), len(tokens), dtype=np.int32)
                assert [self.slots[g][s] for s in table.slots(g, seen).tolist()] == [
                    tokens[p] for p in seen
                ]

    @invariant()
    def every_page_is_free_or_held_as_often_as_it_is_named(self) -> None:
        for g, pool in enumerate(self.pools):
            pool.check()
            named = np.zeros(pool.num_pages, np.int32)
            named[NULL_PAGE] = 1
            for table, _ in self.live.values():
                np.add.at(named, table.pages(g).page_ids, 1)
            assert np.array_equal(named, pool.refs)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_accepted_draft_nodes_move_from_scratch_pages_to_their_slots():
    pools = [PagePool(32), PagePool(32)]
    table = PageTable(CacheGroups((FULL, WINDOW), pools))
    table.reserve(9, nodes=5)
    table.accept(6, (0, 2, 4))
    for g, size in enumerate((4, 2)):
        pages = table.pages(g)
        scratch = [int(pages.scratch[n // size]) * size + n % size for n in (0, 2, 4)]
        assert pages.moves[:, 0].tolist() == scratch
        assert pages.moves[:, 1].tolist() == table.slots(g, np.array([6, 7, 8], np.int32)).tolist()
    with pytest.raises(RuleError, match="forked when its keys are in place"):
        table.fork(6)


@pytest.mark.parametrize(
    "spec", [FULL, replace(WINDOW, kv_dtype="bfloat16"), replace(FULL, kv_dtype="float8_e4m3")]
)
def test_the_printed_arithmetic_equals_the_bytes_of_the_storages(spec):
    storages = Pool(spec, 9, Ops()).storages
    stored_bytes = sum(storage.nbytes for layer in storages for storage in layer)
    assert stored_bytes == group_bytes(spec, 9)
    assert f"{stored_bytes:,} B" in arithmetic([(spec, 9)]).splitlines()[-1]


def test_a_latent_row_is_stored_once_and_v_is_its_first_columns():
    attn = (AttnSpec(0.5, k_scale=0.5, v_scale=0.5),)
    pool = Pool(GroupSpec(Layout.LATENT, 4, 1, 10, 8, attn, page_size=2), 3, Ops())
    rows = torch.randn(2, 1, 10)
    pool.write(0, torch.tensor([2, 5]), rows, rows[..., :8])
    k, v = pool.keys(0)
    assert pool.storages[0][0].nbytes == 6 * 16 * 4, "10 columns are stored as 16"
    assert v.data_ptr() == k.data_ptr()
    assert torch.equal(v[5], rows[1, :, :8] / 0.5)


def test_fp8_is_clamped_divided_by_its_scale_and_read_back_exactly():
    spec = replace(FULL, kv_dtype="float8_e4m3")
    pool = Pool(spec, 3, Ops())
    values = (
        torch.tensor([1000.0, -1000.0, 0.3, 3e-3, 0.0, 448.0, 17.0, -2.5])
        .expand(1, 2, 8)
        .contiguous()
    )
    pool.write(1, torch.tensor([4]), values, values)
    k, v = pool.keys(1)
    assert torch.equal(
        k[4].float(), (values[0] / 2.0).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    )
    assert torch.equal(
        v[4].float(), (values[0] / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    )
    assert not torch.equal(k[4].view(torch.uint8), v[4].view(torch.uint8))


def test_moves_read_every_row_before_any_is_written():
    pool = Pool(FULL, 4, Ops())
    k = torch.randn(3, 2, 8)
    pool.write(0, torch.tensor([4, 5, 6]), k, k)
    pool.move(torch.tensor([[4, 5], [5, 6], [6, 4]], dtype=torch.int32))
    assert torch.equal(pool.keys(0).k[[5, 6, 4]], k)


def test_a_fresh_group_passes_its_rows_through_and_has_no_pool():
    spec = replace(FULL, layout=Layout.FRESH, layers=(AttnSpec(0.5),))
    empty = torch.zeros(0, dtype=torch.int32)
    stores = view(spec, None, PlanArrays(*[empty] * 14))
    assert isinstance(stores, UncachedKv)
    k = torch.randn(3, 2, 8)
    assert stores.keys(0, k, k).k is k
    with pytest.raises(RuleError, match="a cached group has a pool"):
        view(FULL, None, PlanArrays(*[empty] * 14))


def test_a_write_needs_a_row_for_every_slot():
    pool = Pool(FULL, 4, Ops())
    stores = KvWriter(pool, PlanArrays(*[torch.tensor([4, 5], dtype=torch.int32)] * 14))
    with pytest.raises(RuleError, match="one K and one V row per slot"):
        stores.keys(0, torch.randn(1, 2, 8), torch.randn(1, 2, 8))
