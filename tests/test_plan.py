"""The plan: what `build` derives, what `pad` appends, what `check` refuses, what an image
contains."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.plan import check as rules
from lockstep.plan.bucket import Buckets, pad
from lockstep.plan.build import RequestWork, build, paths
from lockstep.plan.check import check
from lockstep.plan.image import ImageLayout, write
from lockstep.plan.step import Bucket, PagedGroup, StepPlan, ints
from lockstep.types import AttnSpec, GroupSpec, Layout, PlanError, RuleError

ATTN = (AttnSpec(0.5),)
FULL = GroupSpec(Layout.DENSE, 4, 2, 8, 8, ATTN, page_size=4)
WINDOW = replace(FULL, window=6, page_size=2)
CROSS = replace(FULL, layout=Layout.CROSS, causal=False)
FRESH = replace(FULL, layout=Layout.FRESH)
POOL = 64


class Batch:
    """Requests with real page tables, built into `RequestWork` as the engine does."""

    def __init__(self, *specs: GroupSpec) -> None:
        self.specs = specs
        self.pools = [None if s.layout is Layout.FRESH else PagePool(POOL) for s in specs]

    def table(self) -> PageTable:
        return PageTable(CacheGroups(self.specs, self.pools))

    def work(
        self, cached: int, new: int, table: PageTable | None = None, **more: object
    ) -> RequestWork:
        table = table or self.table()
        parents = more.get("parents")
        depth = max(map(len, paths(parents, len(parents)))) if parents else new
        table.reserve(cached + depth, len(parents or ()), more.get("cross_len", 0))
        table.release(cached)
        return RequestWork(
            cached, new, tuple(table.pages(g) for g in range(len(self.specs))), **more
        )

    def build(self, *works: RequestWork) -> StepPlan:
        return build(self.specs, works)

    def check(self, plan: StepPlan) -> None:
        check(plan, tuple(p.num_pages if p else 0 for p in self.pools))


def group(plan: StepPlan, g: int = 0) -> PagedGroup:
    assert isinstance(plan.groups[g], PagedGroup)
    return plan.groups[g]


def image_of(plan: StepPlan) -> tuple[ImageLayout, np.ndarray]:
    """Returns a plan's image layout and its image, with nothing derived."""
    layout = ImageLayout(plan.bucket, tuple(g.spec for g in plan.groups), (0,) * len(plan.groups))
    image = np.full(layout.length, -7, np.int32)
    write(image, layout, plan, ())
    return layout, image


def test_a_mixed_batch_is_described_by_lengths_alone():
    b = Batch(FULL)
    plan = b.build(b.work(0, 5), b.work(7, 1), b.work(3, 2))
    assert plan.q_indptr.tolist() == [0, 5, 6, 8]
    assert plan.positions.tolist() == [0, 1, 2, 3, 4, 7, 3, 4]
    assert group(plan).kv_lens.tolist() == [5, 8, 5]
    assert plan.start.tolist() == [p + 1 for p in plan.positions]
    assert plan.emit.tolist() == [4, 5, 7]
    assert plan.bucket.width == 0
    b.check(plan)


def test_arrays_are_read_only():
    b = Batch(FULL)
    plan = b.build(b.work(0, 3))
    for array in (plan.positions, group(plan).page_ids, group(plan).write_slots):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_plan_does_not_change_when_its_table_grows():
    b = Batch(FULL)
    table = b.table()
    plan = b.build(b.work(0, 3, table))
    before = image_of(plan)[1]
    table.reserve(40)
    assert np.array_equal(image_of(plan)[1], before)


def test_an_empty_batch_is_legal_and_can_be_padded():
    b = Batch(FULL, WINDOW)
    plan = b.build()
    b.check(plan)
    padded = pad(plan, Bucket(2, 2, 1, 0, 0, (2, 2), (2, 2), (0, 0)))
    b.check(padded)
    assert padded.real.tokens == 0
    assert padded.q_indptr.tolist() == [0, 1, 2]


def test_tree_rows_list_the_slots_of_their_path_and_have_the_position_of_their_depth():
    b = Batch(FULL)
    plan = b.build(b.work(6, 4, parents=(-1, 0, 0, 1)))
    b.check(plan)
    assert plan.positions.tolist() == [6, 7, 7, 8]
    assert np.diff(plan.tail_indptr).tolist() == [1, 2, 2, 3]
    assert plan.bucket.tail == 3, "the longest list, not all of them"
    slots = group(plan).tail_slots
    lists = [
        slots[a:z].tolist() for a, z in zip(plan.tail_indptr, plan.tail_indptr[1:], strict=False)
    ]
    own = group(plan).write_slots.tolist()
    assert lists == [[own[0]], [own[0], own[1]], [own[0], own[2]], [own[0], own[1], own[3]]]
    assert len(set(own)) == 4


def test_a_draft_step_computes_the_last_nodes_and_lists_the_earlier_ones():
    b = Batch(FULL)
    table = b.table()
    first = b.build(b.work(5, 2, table, parents=(-1, -1)))
    second = b.build(b.work(5, 2, table, parents=(-1, -1, 0, 1)))
    written = group(first).write_slots.tolist()
    lists = group(second).tail_slots
    assert lists[0] == written[0]
    assert lists[2] == written[1]
    b.check(second)


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-1, -2)])
def test_a_parent_that_does_not_come_before_its_node_is_refused(parents):
    with pytest.raises(RuleError, match="parent comes before it"):
        paths(parents, len(parents))


@pytest.mark.parametrize("new_len", [0, 3])
def test_a_tree_step_with_no_row_or_with_more_rows_than_nodes_is_refused(new_len):
    with pytest.raises(RuleError, match=f"got {new_len} rows of 2 nodes"):
        paths((-1, 0), new_len)


def test_cross_attention_keys_are_written_by_the_encoder_and_only_read_by_the_decoder():
    encoder = Batch(replace(FULL, layout=Layout.FRESH, causal=False), CROSS)
    table = encoder.table()
    plan = encoder.build(encoder.work(0, 9, table, cross_len=9, cross_new=9))
    encoder.check(plan)
    assert len(group(plan, 1).write_slots) == 9
    decoder = Batch(FULL, CROSS)
    plan = decoder.build(decoder.work(4, 1, cross_len=9))
    decoder.check(plan)
    assert len(group(plan, 1).write_slots) == 0
    assert group(plan, 1).kv_lens.tolist() == [9]


def test_a_window_group_may_drop_keys_that_no_row_sees():
    b = Batch(FULL, WINDOW)
    table = b.table()
    table.reserve(20)
    table.release(20)
    plan = b.build(b.work(20, 2, table))
    b.check(plan)
    assert group(plan, 1).first_pos.tolist() == [14]  # row 20 sees 15..20; page-aligned down by 2
    assert group(plan, 0).first_pos.tolist() == [0]


def test_padding_appends_rows_and_changes_no_real_row():
    b = Batch(FULL, WINDOW)
    plan = b.build(b.work(0, 3), b.work(9, 1), b.work(2, 4, parents=(-1, 0, 0, 2)))
    padded = pad(plan, Buckets((1, 2, 4, 8, 16)).fit(plan))
    b.check(padded)
    assert padded.bucket.tokens == 8 or padded.bucket.tokens == 16
    assert padded.q_indptr[-1] == padded.bucket.tokens == len(padded.positions)
    for name in ("positions", "start", "emit"):
        assert np.array_equal(
            getattr(padded, name)[: len(getattr(plan, name))], getattr(plan, name)
        )
    assert np.array_equal(group(padded).write_slots[:8], group(plan).write_slots)
    pads = group(padded).write_slots[plan.real.tokens :]
    assert (pads < FULL.page_size).all()  # page 0, the null page


def test_a_uniform_batch_keeps_its_width_when_padded():
    b = Batch(FULL)
    plan = b.build(*(b.work(5, 2) for _ in range(3)))
    bucket = Buckets((4, 8)).fit(plan)
    assert (bucket.requests, bucket.tokens, bucket.width) == (4, 8, 2)
    assert pad(plan, bucket).new_lens.tolist() == [2] * 4


def test_a_uniform_batch_is_padded_to_no_more_rows_than_the_largest_bucket_has():
    """A buffer with room for the largest bucket's rows, such as a head's states, has room for every
    step."""
    b = Batch(FULL)
    plan = b.build(*(b.work(5, 5) for _ in range(3)))
    bucket = Buckets((4, 16)).fit(plan)
    assert (bucket.requests, bucket.tokens, bucket.width) == (4, 16, 0)
    decode = b.build(*(b.work(5, 1) for _ in range(3)))
    assert Buckets((16,), requests=(32,)).fit(decode).tokens == 16


def test_fit_gives_a_pad_request_whenever_there_is_a_pad_row():
    b = Batch(FULL)
    plan = b.build(b.work(0, 3), b.work(0, 2))
    bucket = Buckets((2, 8, 16)).fit(plan)
    assert bucket.requests > 2
    assert bucket.tokens == 8


def test_a_step_larger_than_every_bucket_is_refused_with_both_numbers():
    b = Batch(FULL)
    with pytest.raises(RuleError, match=r"at most 4 tokens; got 9"):
        Buckets((1, 2, 4)).fit(b.build(b.work(0, 5), b.work(0, 4)))


def test_a_table_longer_than_its_bucket_is_refused():
    b = Batch(FULL)
    plan = b.build(b.work(30, 1))
    with pytest.raises(RuleError, match=r"at most \(2,\) pages; got \(16,\)"):
        pad(plan, Bucket(1, 1, 1, 1, 0, (2,), (1,), (0,)))


def broken(plan: StepPlan, **fields: object) -> StepPlan:
    return replace(plan, groups=(replace(plan.groups[0], **fields), *plan.groups[1:]))


def test_check_refuses_a_plan_with_wrong_pages_lengths_or_slots():
    b = Batch(FULL)
    plan = b.build(b.work(6, 2), b.work(9, 3))
    g = group(plan)
    cases = {
        "page ids are below the pool's": {"page_ids": ints([POOL, *g.page_ids[1:]])},
        "a page that is written is in one page table, once": {
            "page_ids": ints([g.page_ids[0], g.page_ids[3], *g.page_ids[2:]])
        },
        "kv_len is 1": {"kv_lens": ints(g.kv_lens + 2)},
        "write slots are distinct": {"write_slots": ints([g.write_slots[1], *g.write_slots[1:]])},
        "a row writes to its own request's pages": {"write_slots": ints(g.write_slots[::-1])},
        "first_pos is page-aligned": {"first_pos": ints([1, 0])},
        "only a window drops keys": {"first_pos": ints([4, 0])},
        "rises from 0": {"page_indptr": ints(g.page_indptr[::-1])},
        "has the bucket's shape": {"kv_lens": ints(g.kv_lens[:1])},
    }
    b.check(plan)
    for rule, fields in cases.items():
        with pytest.raises(PlanError, match=rule):
            b.check(broken(plan, **fields))
    with pytest.raises(PlanError, match="row j of a request without a tree is at"):
        b.check(replace(plan, positions=ints([5, 7, 9, 10, 11]), start=ints([6, 8, 10, 11, 12])))


def moved(array: np.ndarray, **entries: int) -> np.ndarray:
    """`array` with other entries: `at2=7` puts 7 into entry 2."""
    other = np.array(array)
    for name, value in entries.items():
        other.reshape(-1)[int(name.removeprefix("at"))] = value
    return ints(other)


def test_check_names_the_rule_that_a_plan_breaks():
    b = Batch(WINDOW)
    plain = b.build(b.work(6, 2), b.work(9, 3))
    tree = b.build(b.work(6, 3, parents=(-1, 0, 0)), b.work(9, 1))
    p, t = group(plain), group(tree)
    far, last = plain.bucket.tokens, p.page_ids[p.page_indptr[-1] - 1]
    bad = {
        rules.Q_RISES: replace(plain, q_indptr=moved(plain.q_indptr, at1=far + 1)),
        rules.TAILS_RISE: replace(plain, tail_indptr=moved(plain.tail_indptr, at0=1)),
        rules.REAL_FIRST: replace(plain, real=plain.real._replace(requests=1)),
        rules.NOT_NEGATIVE: replace(
            plain, positions=moved(plain.positions, at0=-1), start=moved(plain.start, at0=0)
        ),
        rules.LISTED: replace(plain, start=moved(plain.start, at1=3)),
        rules.SHORT_LISTS: replace(
            tree,
            bucket=replace(tree.bucket, tail=1),
            groups=(replace(t, tail_slots=t.tail_slots[:4]),),
        ),
        rules.PLAIN_ROWS: replace(
            plain, positions=moved(plain.positions, at0=5), start=moved(plain.start, at0=6)
        ),
        rules.EMITTED: replace(plain, emit=moved(plain.emit, at0=far)),
        rules.PAGES_RISE: broken(plain, page_indptr=ints(p.page_indptr[::-1])),
        rules.PAGES_FIT: broken(plain, page_indptr=moved(p.page_indptr, at2=99)),
        rules.ALIGNED: broken(plain, first_pos=moved(p.first_pos, at0=1)),
        rules.DROPS: broken(plain, spec=replace(WINDOW, window=None)),
        rules.KV_LEN: broken(plain, kv_lens=moved(p.kv_lens, at1=13)),
        rules.VISIBLE: broken(plain, first_pos=moved(p.first_pos, at0=4)),
        rules.COVERED: broken(plain, page_indptr=moved(p.page_indptr, at1=p.page_indptr[1] - 1)),
        rules.PAGE_IDS: broken(plain, page_ids=moved(p.page_ids, at0=-1)),
        rules.ALONE: broken(plain, page_ids=moved(p.page_ids, at0=last)),
        rules.SLOTS: broken(plain, write_slots=moved(p.write_slots, at0=POOL * WINDOW.page_size)),
        rules.OWN_PAGES: broken(plain, write_slots=ints(p.write_slots[::-1])),
        rules.DISTINCT: broken(plain, write_slots=moved(p.write_slots, at0=p.write_slots[1])),
        rules.MOVES: replace(
            broken(plain, moves=ints([(2, POOL * WINDOW.page_size)])),
            bucket=replace(plain.bucket, moves=(1,)),
        ),
        rules.LIST_SLOTS: broken(tree, tail_slots=moved(t.tail_slots, at0=-1)),
        rules.LIST_PAGES: broken(tree, tail_slots=moved(t.tail_slots, at0=t.write_slots[3])),
        rules.LIST_END: broken(tree, tail_slots=moved(t.tail_slots, at0=t.write_slots[1])),
    }
    b.check(plain)
    b.check(tree)
    assert sorted(bad) == list(range(1, len(rules.TEXTS)))
    said = []
    for rule, plan in bad.items():
        with pytest.raises(
            PlanError, match=re.escape(rules.TEXTS[rule][0].partition("{")[0])
        ) as refused:
            b.check(plan)
        said.append(refused.value.got)
    assert said == [
        "5 (rows, entry 2)",
        "1 (rows, entry 0)",
        "2 where 5 belongs (rows, entry 1)",
        "-1 (rows, entry 0)",
        "0 where 5 belongs (rows, entry 1)",
        "2 entries for 1 (rows, entry 1)",
        "5 where 6 belongs (rows, entry 0)",
        "5 (rows, entry 0)",
        "8 (group 0, entry 0)",
        "99 (group 0, entry 2)",
        "1, pages of 2 (group 0, entry 0)",
        "first_pos 4 (group 0, entry 1)",
        "13 where 12 belongs (group 0, entry 1)",
        "4 where 1 belongs (group 0, entry 0)",
        "8 keys, room for 6 (group 0, entry 0)",
        "-1 (group 0, entry 0)",
        "page 10 (group 0, entry 0)",
        "128 (group 0, entry 0)",
        "request 0, slot 21 (group 0, entry 0)",
        "slot 9 (group 0, entry 1)",
        "128 (group 0, entry 0)",
        "-1 (group 0, entry 0)",
        "request 0, slot 39 (group 0, entry 0)",
        "27 where 26 belongs (group 0, entry 0)",
    ]


def test_a_first_token_has_one_key():
    b = Batch(FULL)
    plan = b.build(b.work(0, 1), b.work(0, 1))
    b.check(plan)
    for at, wrong in ((0, 2), (1, 2), (1, 0)):
        with pytest.raises(
            PlanError,
            match=r"kv_len is 1 \+ the request's last position; got " + f"{wrong} where 1",
        ):
            b.check(broken(plan, kv_lens=moved(group(plan).kv_lens, **{f"at{at}": wrong})))


def test_a_window_group_that_dropped_a_visible_key_is_refused():
    b = Batch(WINDOW)
    plan = b.build(b.work(8, 2))  # row 8 sees 3..8, so pages up to position 2 may be gone
    assert group(plan).first_pos.tolist() == [2]
    with pytest.raises(PlanError, match="no visible key was dropped; got 4 where 3 belongs"):
        b.check(broken(plan, first_pos=ints([4])))


def test_two_requests_may_read_one_page_but_not_write_it():
    b = Batch(FULL)
    parent = b.table()
    b.work(0, 8, parent)
    child = parent.fork(8)
    plan = b.build(b.work(8, 1, parent), b.work(8, 1, child))
    assert set(group(plan).page_ids[:2]) == set(group(plan).page_ids[3:5])
    b.check(plan)
    table = b.table()
    first = b.work(5, 1, table)
    with pytest.raises(PlanError, match="is in one page table, once"):
        b.check(b.build(first, first))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"new_len": 0}, "at least one row"),
        ({"cached_len": -1}, "at least one row"),
        ({"cached_len": 2**31 - 2, "new_len": 5}, "fit in int32"),
        ({"emit": (7,)}, "emit has row numbers"),
        ({"emit": (0, 3)}, "row 3 of 3"),
        ({"pages": ()}, "has pages in every cached group"),
        ({"pages": (None,)}, "None in every fresh one"),
        ({"cached_len": 12}, "pages cover its keys"),
        ({"cross_new": 1}, "an encode step writes all encoder keys"),
        ({"cross_new": 1, "cross_len": 9}, "an encode step writes all encoder keys"),
        ({"cross_new": 3, "cross_len": 2}, "an encode step writes all encoder keys"),
    ],
)
def test_a_work_that_makes_no_sense_is_refused(fields, match):
    b = Batch(FULL)
    with pytest.raises(RuleError, match=match):
        b.build(b.work(0, 3)._replace(**fields))


def test_a_fresh_group_computes_whole_requests():
    b = Batch(FRESH)
    b.check(b.build(b.work(0, 3), b.work(0, 1)))
    with pytest.raises(PlanError, match="whole requests"):
        b.check(b.build(RequestWork(2, 3, (None,))))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6), st.booleans()), max_size=5),
    st.booleans(),
)
def test_an_image_holds_its_plan_and_offsets_depend_on_the_bucket_alone(shares, padded):
    b = Batch(FULL, WINDOW)
    works = [
        b.work(c, n, parents=tuple(range(-1, n - 1)) if tree else None) for c, n, tree in shares
    ]
    plan = b.build(*works)
    if padded and works:
        plan = pad(plan, Buckets(tuple(2**k for k in range(1, 8))).fit(plan))
    b.check(plan)
    layout, image = image_of(plan)
    for own, paged in zip(layout.views(image), plan.groups, strict=True):
        for name in ("q_indptr", "positions", "start", "tail_indptr", "emit"):
            assert np.array_equal(getattr(own, name), getattr(plan, name))
        for name in ("kv_lens", "page_indptr", "page_ids", "first_pos", "tail_slots", "moves"):
            assert np.array_equal(getattr(own, name), getattr(paged, name))
    first, second = layout.views(image), layout.views(np.arange(len(image), dtype=np.int32))
    for v, offsets in zip(first, second, strict=True):
        assert np.array_equal(v.page_ids, image[offsets.page_ids])
        assert np.array_equal(v.write_slots, image[offsets.write_slots])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"window": 0}, "at least 1; got 0. Use None for no window"),
        ({"window": -3}, "at least 1"),
        ({"window": 4, "causal": False, "layout": Layout.FRESH}, "a window needs a causal group"),
        ({"causal": False}, "a cached group is causal"),
        ({"heads": 5}, "multiple of kv_heads; got 5 and 2"),
        ({"kv_dtype": "int4"}, "kv_dtype is one of"),
        ({"page_size": 0}, "at least 1"),
        ({"layout": Layout.LATENT}, "one kv head"),
        ({"layout": Layout.CROSS}, "a cross group is not causal"),
        ({"layout": Layout.FRESH, "kv_dtype": "bfloat16"}, "stores no keys"),
        ({"layers": (AttnSpec(0.5, sinks=(0.1,)),)}, "one logit per query head"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(change, match):
    with pytest.raises(RuleError, match=match):
        replace(FULL, **change)


@pytest.mark.parametrize(
    "fields",
    [
        {"scale": 0.0},
        {"scale": float("nan")},
        {"scale": 1.0, "soft_cap": 0.0},
        {"scale": 1.0, "k_scale": -1.0},
    ],
)
def test_a_layer_that_makes_no_sense_is_refused(fields):
    with pytest.raises(RuleError, match="finite number above 0"):
        AttnSpec(**fields)
