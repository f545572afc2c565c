"""Places where `lockstep lab mutate` found a small mutant that no test noticed: the bound, the
default or the order of each, tested where a caller sees it."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch

import lockstep
from lockstep import SamplingParams, plugins
from lockstep.attention import select
from lockstep.attention.cpu import block_rows, blocks, most_blocks
from lockstep.config import EngineConfig
from lockstep.kernels.cpu.ops import Ops
from lockstep.kernels.select import DEVICES
from lockstep.kv.prefix import Prefix, Root
from lockstep.kv.tables import CacheGroups, PagePool, PageTable, shared_pages
from lockstep.lab import tiny
from lockstep.llm import prompts
from lockstep.llm.engine import Engine, Launched, Parts, prepare
from lockstep.llm.output import Completion, Output
from lockstep.models.loader import Loaded
from lockstep.plan import check as rules
from lockstep.plan.bucket import Buckets
from lockstep.plan.build import RequestWork, build, next_power_of_2
from lockstep.plan.check import check
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import PagedGroup, StepPlan, ints
from lockstep.run.certify import NotCertified, Subject, certify
from lockstep.sample import sampler
from lockstep.sample.sampler import Row, RowBatch
from lockstep.sched.request import Request, RequestSpec
from lockstep.types import AttnSpec, GroupSpec, Layout, PlanError, Refused, RuleError

FULL = GroupSpec(Layout.DENSE, 4, 2, 8, 8, (AttnSpec(0.5),), page_size=4)
POOL = 64
# classes that are filled in while something is read or measured
GROW = ("Acceptance", "Costs", "DraftState", "Line", "PageTable")
PROMPT = (5, 9, 2, 11, 4, 7)


def plan_of(*lens: tuple[int, int], parents: tuple[int, ...] | None = None) -> StepPlan:
    """Returns the plan of a step of requests with (cached, new) rows each; `parents` makes the
    first a tree."""
    pools = [PagePool(POOL)]
    works = []
    for cached, new in lens:
        table = PageTable(CacheGroups((FULL,), pools))
        table.reserve(cached + new, len(parents or ()))
        works.append(RequestWork(cached, new, (table.pages(0),), parents=parents))
        parents = None
    return build((FULL,), works)


# ---- values ----


def test_dataclasses_of_the_engine_are_frozen():
    found = []
    for path in sorted(Path(lockstep.__file__).parent.rglob("*.py")):
        if not {"lab", "bench"} & set(path.parts):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                made = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
                if any(d.startswith("dataclass") and "frozen=True" not in d for d in made):
                    found.append(node.name)
    assert set(found) <= set(GROW), "a dataclass of the engine is frozen"


@pytest.mark.parametrize(
    "kind", [Completion, Launched, Output, PagedGroup, Parts, PlanArrays, StepPlan, Subject]
)
def test_dataclasses_with_tensors_compare_and_hash_by_identity(kind):
    assert kind.__eq__ is object.__eq__
    assert kind.__hash__ is object.__hash__


# ---- plans ----


def test_a_lone_decode_row_keeps_its_width_and_a_lone_prompt_has_none():
    buckets = Buckets((1, 2, 4, 8))
    alone, prompt = buckets.fit(plan_of((5, 1))), buckets.fit(plan_of((0, 3)))
    assert (alone.width, alone.requests, alone.tokens) == (1, 1, 1)
    assert (prompt.width, prompt.requests, prompt.tokens) == (0, 2, 4)


def test_the_next_power_of_2_of_a_power_of_2_is_itself():
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 1024, 1025)] == [
        *(0, 1, 2, 4, 4, 8, 8, 16, 1024, 2048)
    ]


def test_a_tail_list_that_ends_at_another_slot_is_refused_with_both_slots():
    plan = plan_of((6, 3), (9, 1), parents=(-1, 0, 0))
    (group,) = plan.groups
    check(plan, (POOL,))
    slots, wrong = group.write_slots, group.tail_slots.copy()
    wrong[0] = slots[2]  # the list of row 0 names the slot of row 2
    assert len({*slots[:3].tolist()}) == 3
    with pytest.raises(PlanError, match=rules.TEXTS[rules.LIST_END][0]) as refused:
        check(replace(plan, groups=(replace(group, tail_slots=ints(wrong)),)), (POOL,))
    assert f"{slots[2]} where {slots[0]} belongs" in refused.value.got


def test_the_greatest_block_count_of_a_bucket_is_reached_and_not_exceeded():
    size = block_rows(FULL)
    for requests, more in ((1, 0), (3, 0), (2, size - 1), (2, size), (3, 2 * size - 1)):
        plan = plan_of(*((1, 1) for _ in range(requests - 1)), (0, 1 + more))
        assert len(blocks(plan, size)) == most_blocks(FULL, plan.bucket)


def test_a_block_has_at_least_one_row_in_any_group():
    assert block_rows(replace(FULL, heads=4096, kv_heads=1)) == 1


# ---- pages ----


def test_a_pool_of_the_null_page_alone_is_refused():
    with pytest.raises(RuleError, match="at least one"):
        PagePool(1)
    assert PagePool(2).free == 1


def test_a_page_that_begins_at_the_shared_length_is_not_shared():
    single = replace(FULL, page_size=1)
    assert shared_pages(single, [7, 8], 3, 3) == []
    assert shared_pages(single, [7, 8], 3, 4) == [7]


def test_a_match_does_not_mark_a_block_that_its_window_has_left_as_recently_used():
    specs = (FULL, replace(FULL, window=5))
    pools = [PagePool(40), PagePool(40)]
    tree = Prefix(CacheGroups(specs, pools))

    def opened(ids: list[int]) -> int:
        """Matches the ids, computes the rest and closes. Returns how many tokens were cached."""
        table = PageTable(CacheGroups(specs, pools))
        node = tree.match(Root(), ids, table)
        found = node.end
        table.reserve(len(ids))
        tree.close(tree.insert(node, ids, table, len(ids)))
        table.close()
        return found

    long, short = [*range(12), 99], [50, 51, 52, 53, 99]
    assert [opened(ids) for ids in (long, short, long)] == [0, 0, 12]
    assert tree.evict(1, 2) == 2  # rows at 12 see keys from 8 on: blocks [0, 4) and [4, 8) go
    assert [opened(ids) for ids in (short, long)] == [4, 12]


# ---- backends ----


def test_the_reference_serves_heads_up_to_a_million_columns():
    caps = select.load("reference").caps
    most = replace(FULL, d_qk=1 << 20, d_v=1 << 20)
    assert select.refusal(caps, most, "cpu") is None
    beyond = select.refusal(caps, replace(FULL, d_qk=(1 << 20) + 8), "cpu")
    assert beyond is not None and beyond.endswith(f"up to {1 << 20}")


def test_a_backend_that_cannot_be_loaded_is_skipped_and_named(monkeypatch):
    found, group = plugins.entry_points, select.BACKENDS.group
    broken = EntryPoint("broken", "no_such_package.backend:Backend", group)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [*found(group=group), broken])
    monkeypatch.setattr(select, "names", lambda: ["broken", "cpu"])
    _, choice = select.select(None, [FULL], "cpu")
    assert choice.name == "cpu"
    assert "not broken: ModuleNotFoundError: No module named 'no_such_package'" in choice.reason


class Half:
    """An unfinished device and an unfinished backend, as after an hour of writing one."""

    dtypes = ("float32",)

    def linear(self, x, packed):
        return x


@pytest.mark.parametrize("found", [select.BACKENDS, DEVICES], ids=lambda found: found.kind)
def test_a_backend_or_device_that_lacks_a_member_is_refused_with_its_name(found, monkeypatch):
    half = EntryPoint("half", f"{__name__}:Half", found.group)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [half])
    missing = {"backend": "caps, derived_len, lower,", "device": "dtype, device, machine, gemm_"}
    text = f"{found.kind} half has all of lockstep.*; got no {missing[found.kind]}"
    with pytest.raises(Refused, match=text):
        found.make("half")


# ---- the certificate ----


class WrongInMixedSteps:
    """The CPU backend without trees, wrong in the last bits where a chunk is in a step with at
    least three single rows: only in mixed steps."""

    def __init__(self) -> None:
        self.sound = select.load("cpu")
        self.caps = replace(self.sound.caps, tails=False)

    def derived_len(self, spec: Any, bucket: Any) -> int:
        return self.sound.derived_len(spec, bucket)

    def bind(self, *args: Any) -> Any:
        return self.sound.bind(*args)

    def lower(self, plan: Any, group: Any, views: Any) -> Any:
        lens = plan.new_lens.tolist()
        self.wrong = lens.count(1) >= 3 and max(lens) > 1
        return self.sound.lower(plan, group, views)

    def attend(self, q: Any, keys: Any, handle: Any, spec: Any) -> Any:
        out, lse = self.sound.attend(q, keys, handle, spec)
        return (out + 2.0**-20 if self.wrong else out), lse


def test_a_backend_without_trees_is_certified_in_every_other_kind_of_step():
    model, info = tiny.loaded(tiny.LLAMA)
    with pytest.raises(NotCertified, match=r"rows \(mixed\)"):
        certify(model, WrongInMixedSteps(), info, EngineConfig(chunked_prefill_size=64))


def wrong_at(rows: int) -> Ops:
    """Returns the CPU's table with a GEMM that is wrong at this row count only."""
    right = Ops.linear

    class Wrong(Ops):
        @staticmethod
        def linear(x: torch.Tensor, packed: Any) -> torch.Tensor:
            y = right(x, packed)
            return torch.nextafter(y, y + 1) if len(x) == rows else y

    return Wrong()


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bart() -> Loaded:
    return tiny.loaded(tiny.BART)


@pytest.mark.parametrize("rows", [64, 128])
def test_an_encoder_is_certified_with_every_row_count_up_to_the_largest(rows, one_thread):
    model, info = bart()
    block = model.encoder.blocks[0]
    wrong = replace(block, mlp=replace(block.mlp, up=replace(block.mlp.up, ops=wrong_at(rows))))
    model = replace(model, encoder=replace(model.encoder, blocks=(wrong,)))
    with pytest.raises(NotCertified) as refused:
        prepare(Loaded(model, info), None, EngineConfig(chunked_prefill_size=128))
    assert refused.value.got == f"a difference at {rows} rows (sources) and 1 threads"


@pytest.mark.parametrize(
    ("loaded", "digest"),
    [(bart, "41f35d51e58c11c9"), (lambda: tiny.loaded(tiny.LLAMA), "f2afafc1bb9a2ea9")],
    ids=["bart", "llama"],
)
def test_the_rows_of_a_certificate_keep_their_recorded_digest(loaded, digest, one_thread):
    parts = prepare(loaded(), None, EngineConfig(chunked_prefill_size=128))
    assert parts.certificate == digest


# ---- sampling ----


def test_top_k_1_chooses_the_best_token_whatever_the_noise():
    logits = torch.linspace(0, 1, 50)[torch.randperm(50, generator=torch.manual_seed(3))]
    rows = [Row(SamplingParams(temperature=1, top_k=1, seed=seed), 4) for seed in range(20)]
    for row in rows:
        chosen = sampler.sample(Ops(), logits[None], RowBatch.of([row]))
        assert chosen.token_ids.tolist() == [int(logits.argmax())]


@pytest.mark.parametrize(
    ("params", "cuts"),
    [({}, False), ({"top_k": 1}, True), ({"top_k": 2}, True), ({"top_p": 0.9}, True)],
    ids=str,
)
def test_the_sampling_operation_is_passed_whether_tokens_are_cut(params, cuts):
    """A kernel that is passed cuts=False looks for no tokens to cut."""
    told = []

    class Told(Ops):
        @staticmethod
        def sample_tokens(logits: Any, floats: Any, ints: Any, cuts: bool) -> Any:
            told.append(cuts)
            return Ops.sample_tokens(logits, floats, ints, cuts)

    row = Row(SamplingParams(temperature=1, seed=2, **params), 4)
    sampler.sample(Told(), torch.zeros(1, 9), RowBatch.of([row]))
    assert told == [cuts]


# ---- requests ----


class BoundedRequest(Request):
    """Fails after 50 calls of `emits`, so that an endless loop ends."""

    asked = 0

    def emits(self, new_len: int) -> int:
        self.asked += 1
        assert self.asked < 50, "no end in sight"
        return super().emits(new_len)


def test_a_request_gets_no_more_rows_than_the_step_may_emit():
    request = BoundedRequest(RequestSpec((1, 2, 3, 4), 8, n=3), 0)
    assert request.fitting_len(10, 3) == 4
    assert request.fitting_len(10, 2) == 3, "its last row would emit three"
    scored = BoundedRequest(RequestSpec((1, 2, 3, 4), 8, wants_prompt_logprobs=True), 0)
    assert [scored.fitting_len(10, emits) for emits in range(5)] == [0, 1, 2, 3, 4]
    decoding = BoundedRequest(RequestSpec((1, 2), 8), 0, first=(3,))
    decoding.cached_len = 2
    assert [decoding.fitting_len(10, emits) for emits in (0, 1)] == [0, 1]


def test_a_fresh_request_has_no_keys():
    request = Request(RequestSpec((1, 2, 3), 4), 0)
    assert (request.cached_len, request.settled_len, request.missing_len) == (0, 0, 3)


# ---- the engine ----


def steps_of(engine: Engine) -> list[tuple[str, list[int]]]:
    """Runs an engine until it is idle. Returns the kind of every step and the row counts of its
    requests."""
    seen: list[tuple[str, list[int]]] = []
    run = engine.runner.run

    def noted(plan: StepPlan, ids: Any, kind: Any, *more: Any) -> Any:
        seen.append((kind.name, plan.new_lens[: plan.real.requests].tolist()))
        return run(plan, ids, kind, *more)

    engine.runner.run = noted  # type: ignore[method-assign]
    while engine.busy:
        engine.step()
    engine.check()
    return seen


def run_alone(engine: Engine, params: SamplingParams, **more: Any) -> Output:
    job = engine.add(PROMPT, params, **more)
    while engine.busy:
        engine.step()
    return job.output("")


def test_more_decoding_requests_than_rows_take_turns():
    """While the first waits for its penalties a third one joins: then there are three for two
    rows."""
    config = EngineConfig(chunked_prefill_size=2, max_total_tokens=400, context_length=64)
    engine = Engine(config, tiny_engine.parts(), overlap=True)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    for i, penalty in enumerate((1.5, 0, 0)):
        engine.add((3 + i,), replace(params, presence_penalty=penalty))
    steps = steps_of(engine)
    assert max(sum(lens) for _, lens in steps) == 2
    assert sum(sum(lens) for _, lens in steps) == 3 * 9


def test_embeddings_are_computed_in_order_of_arrival():
    engine = tiny_engine.engine(chunked_prefill_size=3, max_total_tokens=400)
    for length in (1, 2, 3):
        engine.add(PROMPT[:length], embed=True)
    assert [lens for _, lens in steps_of(engine)] == [[1, 2], [3]]


def test_a_block_of_a_running_request_is_shared_as_soon_as_it_is_full():
    engine = tiny_engine.engine(page_size=4, max_total_tokens=400)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    first = engine.add(PROMPT[:2], params)
    while first.request.settled_len < 4:
        engine.step()
    second = engine.add((*first.request.tokens[:4], 1), replace(params, max_tokens=1))
    while engine.busy:
        engine.step()
    assert second.output("").cached_tokens == 4


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_continued_with_generated_tokens_has_its_prompt_scores(n):
    params = SamplingParams(max_tokens=8, seed=4, n=n, logprobs=True, prompt_logprobs=1)
    engine = tiny_engine.engine(max_total_tokens=400, disable_radix_cache=True)
    want = run_alone(engine, replace(params, ignore_eos=True))
    begun = [completion.token_ids[:3] for completion in want.completions]
    got = run_alone(engine, replace(params, ignore_eos=True), generated=begun)
    assert got.prompt_logprobs.tobytes() == want.prompt_logprobs.tobytes()
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in want.completions]
    for a, b in zip(got.completions, want.completions, strict=True):
        assert a.logprobs.tobytes() == b.logprobs.tobytes()


# ---- prompts ----


def test_the_error_names_the_first_id_outside_the_vocabulary():
    with pytest.raises(RuleError) as refused:
        prompts.token_ids([5, 99, 100], 10)
    assert "99" in refused.value.got


def test_a_list_of_the_greatest_length_is_accepted_and_one_more_element_refused(monkeypatch):
    monkeypatch.setattr(prompts, "MOST", 3)
    assert prompts.elements([1, 2, 3], "") == [1, 2, 3]
    with pytest.raises(RuleError, match="at most 3 entries"):
        prompts.elements([1, 2, 3, 4], "")
