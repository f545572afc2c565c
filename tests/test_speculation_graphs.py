"""Recorded launches that draft, extend and verify, without a GPU: its buckets, through the CPU's
tape. All requests of a step then have the same number of rows, and a chain's tokens are still on
the device while the target's step is planned."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.attention import select
from lockstep.config import EngineConfig
from lockstep.lab.speculative import CHAIN, EAGLE3, NGRAM, TREE, drafts
from lockstep.lab.tiny import CONTEXT, DEEPSEEK, LLAMA, QWEN3, Tiny, parts, words
from lockstep.llm import rows as launches
from lockstep.llm.engine import Engine
from lockstep.llm.output import Speculated
from lockstep.plan.bucket import Buckets
from lockstep.plan.build import build
from lockstep.run.graph import captures
from lockstep.run.kind import DRAFT, EXTEND, GENERATE, VERIFY, StepKind
from lockstep.run.runner import GUESSES, Chain, null_work
from lockstep.sample.params import SamplingParams
from lockstep.spec import depth
from lockstep.spec import select as drafting
from lockstep.spec import speculation as speculations
from lockstep.types import RuleError

WISH = SamplingParams(max_tokens=21, temperature=0.5, logprobs=1, ignore_eos=True)
BLOCK = words(6, 1)
ASKED = (
    (BLOCK * 3, replace(WISH, temperature=0)),
    ((4, 5) * 9, replace(WISH, seed=1)),
    (words(33, 3), replace(WISH, seed=2)),
    (BLOCK * 2, replace(WISH, seed=3, max_tokens=9)),
)
PENALISED = ((7, 8) * 6, replace(WISH, seed=4, frequency_penalty=0.4, top_p=0.9, max_tokens=16))


class Event:
    """An event of a device that is always ready."""

    def record(self) -> None:
        """Records nothing: there is nothing to wait for."""

    def synchronize(self) -> None:
        """Returns immediately: everything has happened."""


def answers(engine: Engine, asked: Any) -> tuple[list[Any], Speculated]:
    jobs = [engine.add(prompt, wish) for prompt, wish in asked]
    while engine.busy:
        engine.step()
    engine.check()
    outs = [job.output("") for job in jobs]
    counts = Speculated(*map(sum, zip(*(out.speculated for out in outs), strict=True)))
    return [(out.token_ids, out.logprobs.tobytes(), repr(out)) for out in outs], counts


def made(tiny: Tiny, overlap: bool = False, **options: Any) -> Engine:
    model = replace(parts(tiny, select.load("cpu")), draft=drafts(tiny))
    names = {"context_length": CONTEXT, "max_total_tokens": 2000, "page_size": 4, **options}
    return Engine(EngineConfig.from_names({"max_running_requests": 8, **names}), model, overlap)


def recorded(tiny: Tiny, overlap: bool, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Engine:
    """Returns an engine set up as on a GPU: steps that decode, draft and verify have buckets, and
    launches sample."""
    engine = made(tiny, overlap, graphs=True, **how)
    speculation = engine.speculation
    engine.on_gpu, speculation.adaptive = True, False
    engine.runner.buckets = Buckets.for_decoding(8, 64, 600, speculation.shape.widths)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    target = engine.kinds[GENERATE]
    for kind, *launch in drafting.launches(engine.config, target, engine.draft_model):
        engine.runner.capture(kind, print, *launch)
    return engine


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", [NGRAM, CHAIN, TREE], ids=["ngram", "chain", "tree"])
@pytest.mark.parametrize("tiny", [QWEN3, DEEPSEEK], ids=lambda tiny: tiny.name)
def test_steps_that_draft_extend_and_verify_are_replayed(tiny, how, overlap, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    for asked in (ASKED, (*ASKED, PENALISED)):
        want, _ = answers(made(tiny), asked)
        engine = recorded(tiny, overlap, monkeypatch, **how)
        captured = {*engine.runner.tapes}
        got, counts = answers(engine, asked)
        assert [each[:2] for each in got] == [each[:2] for each in want]
        assert counts.accepted >= 3 and counts.drafted - counts.accepted >= 3, counts
        replays = engine.runner.replays
        kinds = (VERIFY,) if how is NGRAM else (VERIFY, EXTEND, DRAFT)
        assert all(replays[kind] > 0 for kind in kinds), replays
        if overlap and how is not TREE and asked is ASKED:  # a GPU captures these at start
            widths, new = engine.runner.buckets.widths, {*engine.runner.tapes} - captured
            late = [each.step_name for each in new if captures(each.bucket, widths)]
            assert not {*late} & {DRAFT, EXTEND, VERIFY}, late


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("steps", [3, 7, 15])
@pytest.mark.parametrize("how", [CHAIN, EAGLE3], ids=["chain", "eagle3"])
def test_chains_are_as_long_for_requests_near_the_context_end(how, steps, page_size, monkeypatch):
    """Pages used to be reserved for each request's own guesses, but rows were made for the longest
    chain: the plan reached beyond the pages, and every step failed."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    plain = replace(WISH, temperature=0, max_tokens=None)
    asked = [(words(n, n), plain) for n in (CONTEXT - 40, CONTEXT - 4, CONTEXT - 10)]
    own = {"page_size": page_size, "max_total_tokens": 4000}
    want, _ = answers(made(LLAMA, **own), asked)
    speculative = {**how, "speculative_num_steps": steps, "speculative_num_draft_tokens": None}
    engine = recorded(LLAMA, True, monkeypatch, **own, **speculative)
    got, counts = answers(engine, asked)
    assert [each[:2] for each in got] == [each[:2] for each in want]
    assert counts.drafted and engine.runner.replays[VERIFY] > 0


def test_a_gpu_reserves_memory_for_the_logits_of_launches_that_it_captures():
    config = EngineConfig(speculative_algorithm="ngram", speculative_num_steps=64)
    found = drafting.launches(config, StepKind, None)
    assert [width for _, width, _, _ in found] == [1, 2, 4, 8], "65 rows would be a prefill"
    sizes = sum(Buckets.for_decoding(config.max_running_requests, 0, 0).tokens)
    assert drafting.logits_of(found, config) == drafting.VARIANTS * sizes * (1 + 2 + 4 + 8)


@pytest.mark.parametrize(
    ("count", "chunk", "most"),
    [(3, 64, 6), (6, 42, 6), (6, 41, 3), (6, 24, 3), (6, 23, 1), (6, 12, 1), (6, 11, 0)],
)
def test_drafts_that_do_not_all_fit_into_a_step_are_shortened_for_all_requests(
    count, chunk, most, monkeypatch
):
    """The first requests used to get whole drafts, one the rest and the others none: such a step
    has no recorded launch, so with the default chunk 40 requests never verified by a graph."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    plain = replace(WISH, temperature=0, max_tokens=24)
    asked = [(words(6, n), replace(plain, seed=n)) for n in range(count)]
    own = {"chunked_prefill_size": chunk, "max_total_tokens": 4000}
    want, _ = answers(made(LLAMA, **own), asked)
    speculative = {**EAGLE3, "speculative_num_steps": 6, "speculative_num_draft_tokens": None}
    engine = recorded(LLAMA, True, monkeypatch, **own, **speculative)
    widths, run = Counter[int](), engine.runner.run

    def watch(plan: Any, ids: Any, kind: Any, *how: Any, **more: Any) -> Any:
        drafts = len(plan.emit) == len(plan.positions) > count
        if kind.name == GENERATE and drafts and plan.real.requests == count:
            widths[plan.bucket.width] += 1
        return run(plan, ids, kind, *how, **more)

    engine.runner.run = watch
    got, _ = answers(engine, asked)
    assert [each[:2] for each in got] == [each[:2] for each in want]
    assert max(widths, default=1) == most + 1, widths
    assert 0 not in widths, "every request has as many rows"


def test_a_lone_request_may_have_a_single_draft_token(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    single = {**CHAIN, "speculative_num_steps": 1, "speculative_num_draft_tokens": None}
    engine = recorded(QWEN3, True, monkeypatch, **single)
    (got, counts), (want, _) = answers(engine, ASKED[:1]), answers(made(QWEN3), ASKED[:1])
    assert [each[:2] for each in got] == [each[:2] for each in want]
    assert counts.drafted and engine.runner.replays[VERIFY] > 0


@pytest.mark.parametrize("how", [{}, NGRAM, CHAIN, TREE], ids=["plain", "ngram", "chain", "tree"])
def test_captured_launches_have_the_widths_of_one_row_and_of_drafts(how):
    engine = made(QWEN3, **how)
    shape = engine.speculation.shape if how else None
    widths = shape.widths if shape else (1,)
    pages = -(-(CONTEXT + (2 * shape.steps if shape else 0)) // 4)
    assert engine._buckets(True, 600) == Buckets.for_decoding(8, pages, 600, widths)
    assert engine._buckets(False, 600) is None


@pytest.mark.parametrize("how", [NGRAM, CHAIN], ids=["ngram", "chain"])
def test_with_named_bucket_sizes_no_launch_of_draft_width_is_recorded(how, monkeypatch):
    engine = made(QWEN3, graphs=True, bucket_sizes=[512], **how)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    for kind, *launch in drafting.launches(
        engine.config, engine.kinds[GENERATE], engine.draft_model
    ):
        engine.runner.capture(kind, print, *launch)
    assert [each.bucket.width for each in engine.runner.tapes] == [1]
    (got, _), (want, _) = answers(engine, ASKED), answers(made(QWEN3), ASKED)
    assert [each[:2] for each in got] == [each[:2] for each in want]


@pytest.mark.parametrize("penalised", [False, True])
def test_a_chain_is_settled_by_one_wait_unless_a_penalty_needs_its_tokens(penalised, monkeypatch):
    """The ids of a verify step refer to guesses that the host has not seen."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    engine, seen = recorded(QWEN3, True, monkeypatch, **CHAIN), list[int]()
    run = engine.runner.run

    def watched(plan: Any, ids: Any, kind: Any, *given: Any, **named: Any) -> Any:
        if kind.name == "generate":
            seen.extend(int(each) for each in ids)
        return run(plan, ids, kind, *given, **named)

    monkeypatch.setattr(engine.runner, "run", watched)
    asked = (*ASKED, PENALISED) if penalised else ASKED
    want, _ = answers(made(QWEN3), asked)
    got, counts = answers(engine, asked)
    assert [each[:2] for each in got] == [each[:2] for each in want] and counts.accepted
    late = sum(each < -GUESSES for each in seen)
    assert late == counts.drafted if not penalised else 0 < late < counts.drafted


def test_draft_tokens_kept_for_the_next_step_need_a_runner_with_overlap(monkeypatch):
    """Without overlap, a launch of a chain sampled one token and was captured for no step at
    all."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    for overlap in (False, True):
        engine = recorded(QWEN3, overlap, monkeypatch, **CHAIN)
        assert any(each.chain for each in engine.runner.tapes) == overlap
    runner, draft = made(QWEN3, **CHAIN).runner, engine.draft_model
    plan = build(draft.extend.specs, [null_work(draft.extend.specs, 4, (1,))])
    with pytest.raises(RuleError, match=r"without a plan keeps its guesses.*without overlap"):
        runner.run(plan, (), draft.extend, chain=Chain(draft.kind, 3))


def test_requests_of_a_recorded_step_rest_and_try_together(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    engine = recorded(QWEN3, False, monkeypatch, **CHAIN)
    speculation, scheduler = engine.speculation, engine.scheduler
    for prompt, wish in ASKED:
        engine.add(prompt, wish)
    engine.step()
    nothing = lambda self, acceptances, *_: [0] * len(acceptances)  # noqa: E731
    monkeypatch.setattr(depth.Costs, "depths", nothing)
    monkeypatch.setattr(depth.Line, "known", True)
    speculation.adaptive = True
    assert speculation._wanted(scheduler) == {} and speculation._acceptance.rests_until
    assert speculation._wanted(scheduler) == {}
    scheduler.settled = speculation._acceptance.rests_until
    assert {*speculation._wanted(scheduler).values()} == {speculation.shape.steps}
    assert len(speculation._wanted(scheduler)) == 0  # one try, then a longer rest


def test_chains_of_a_recorded_step_are_padded_to_the_longest():
    asks = [speculations.DraftRequest(None, WISH, steps, 4) for steps in (4, 2, 4)]
    trees = [
        speculations.DraftTree((7, 8, 9), (0, 1, 2)),
        speculations.DraftTree((), ()),
        speculations.DraftTree((5,), (0,)),
    ]
    shape = speculations.TreeShape(steps=5, top_k=1, nodes=5)
    assert shape.depths == (1, 3, 5) and shape.widths == (1, 2, 4, 6, 8, 10)
    assert [shape.rounded(n) for n in range(6)] == [0, 1, 3, 3, 5, 5]
    evened = speculations.pad_chains(asks, trees, shape)
    assert [tree.token_ids for tree in evened] == [(7, 8, 9), (0, 0), (5, 0, 0)]
    assert [tree.pads for tree in evened] == [0, 2, 2]
    assert all(tree.chain for tree in evened)


@pytest.mark.parametrize("how", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("tokens", range(4, 8))
def test_a_shallow_draft_has_pages_for_the_rows_that_pad_its_step(how, tokens, monkeypatch):
    """A tree of one level had no room at the end of a page: its first step has more rows than its
    depth."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    asked = [(words(tokens, 3), replace(WISH, seed=1))]
    engine = recorded(QWEN3, False, monkeypatch, **how)
    wanted = engine.speculation._wanted
    engine.speculation._wanted = lambda scheduler: dict.fromkeys(wanted(scheduler), 1)
    (got, counts), (want, _) = answers(engine, asked), answers(made(QWEN3), asked)
    assert [each[:2] for each in got] == [each[:2] for each in want] and counts.drafted


@pytest.mark.parametrize("how", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_padded_extend_step_of_a_draft_has_a_captured_width(how, monkeypatch):
    """With a penalty a chain is guessed step by step, and begins as a tree does."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    engine, widths = recorded(QWEN3, False, monkeypatch, **how), set[int]()
    extend = engine.speculation.draft._extend

    def watched(ends: Any, width: int = 0, *more: Any, **kind: Any) -> Any:
        widths.add(width)  # 0 where a draft only catches up
        return extend(ends, width, *more, **kind)

    engine.speculation.draft._extend = watched
    answers(engine, (PENALISED, ASKED[0]))
    assert max(widths) > 0 and widths <= {0, *engine.runner.widths}


def test_pads_of_a_chain_are_not_counted_as_draft_tokens(monkeypatch):
    """They used to count: where one request in twenty had a guess, the acceptance rate seemed to be
    almost 0."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    engine = recorded(QWEN3, False, monkeypatch, **NGRAM)
    jobs = [engine.add(*each) for each in ASKED[:2]]
    propose = engine.speculation.draft.propose

    def for_the_first_only(asks: Any) -> Any:
        trees = propose(asks)
        mine = [ask.request is jobs[0].request for ask in asks]
        none = speculations.DraftTree((), ())
        return [tree if own else none for tree, own in zip(trees, mine, strict=True)]

    engine.speculation.draft.propose = for_the_first_only
    while engine.busy:
        engine.step()
    first, second = (job.output("").speculated for job in jobs)
    assert first.drafted >= first.accepted > 0
    assert second == Speculated()


@pytest.mark.parametrize("how", [CHAIN, EAGLE3], ids=["chain", "eagle3"])
def test_the_next_chains_are_drafted_before_a_verify_is_settled_and_are_the_same(how, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    found, used = [], []
    for early in (False, True):
        engine = recorded(LLAMA, True, monkeypatch, **how)
        draft = engine.speculation.draft
        if not early:
            draft.launched = lambda *_: None
        taken = draft._take_early_chains

        def watched(*given: Any, taken: Any = taken) -> Any:
            trees = taken(*given)
            used.append(trees is not None)
            return trees

        draft._take_early_chains = watched
        found.append(answers(engine, ASKED))
    assert [each[:2] for each in found[0][0]] == [each[:2] for each in found[1][0]]
    assert found[0][1] == found[1][1], "as many guesses, as many of them right"
    assert used.count(True) > 3, used


def proposed(engine: Engine) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Returns a dict that is filled from now on: the tokens of a request -> the ids guessed after
    them, if there are any."""
    propose, found = engine.speculation.draft.propose, dict[tuple[int, ...], tuple[int, ...]]()

    def watched(asks: Any) -> Any:
        trees = propose(asks)
        for ask, tree in zip(asks, trees, strict=True):
            ids = [engine.runner.sampled[~i].item() if i < 0 else i for i in tree.token_ids]
            if ids:
                found[tuple(ask.request.tokens)] = tuple(ids)
        return trees

    engine.speculation.draft.propose = watched
    return found


@pytest.mark.parametrize("how", [CHAIN, EAGLE3], ids=["chain", "eagle3"])
def test_chains_that_were_drafted_early_are_not_used_after_a_further_step(how, monkeypatch):
    """They used to be used one plain step later: guesses for the token before, and wrong draft
    keys."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    found = []
    for early in (False, True):
        engine = recorded(LLAMA, True, monkeypatch, **how | {"speculative_num_steps": 7})
        speculation, guesses = engine.speculation, proposed(engine)
        if not early:
            speculation.draft.launched = lambda *_: None
        wanted = speculation._wanted

        def now_and_then(scheduler: Any, wanted: Any = wanted) -> Any:
            return wanted(scheduler) if scheduler.settled % 5 < 3 else {}

        monkeypatch.setattr(speculation, "_wanted", now_and_then)
        want, _ = answers(engine, ASKED)
        found.append((want, guesses))
    assert [each[:2] for each in found[0][0]] == [each[:2] for each in found[1][0]]
    (_, apart), (_, together) = found
    same = apart.keys() & together.keys()
    assert len(same) > 5 and all(apart[tokens] == together[tokens] for tokens in same)


@pytest.mark.parametrize("how", [CHAIN, EAGLE3], ids=["chain", "eagle3"])
def test_a_failure_while_chains_are_drafted_early_changes_no_later_draft(how, monkeypatch):
    """The rows by which the failed launch was ahead of its plan used to stay set for all later
    launches."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    engine = recorded(LLAMA, True, monkeypatch, **how)
    plan, guesses = engine.speculation.draft._plan, proposed(engine)
    right = proposed(other := recorded(LLAMA, True, monkeypatch, **how))
    want, _ = answers(other, ASKED)
    failed = list[bool]()

    def once(*given: Any) -> Any:
        if not failed and engine.runner.shift.any():
            failed.append(True)
            raise KeyboardInterrupt
        return plan(*given)

    monkeypatch.setattr(engine.speculation.draft, "_plan", once)
    jobs = [engine.add(*each) for each in ASKED]
    while engine.busy:
        with suppress(KeyboardInterrupt):
            engine.step()
    engine.check()
    assert failed and [job.output("").token_ids for job in jobs] == [each[0] for each in want]
    assert all(right.get(tokens, ids) == ids for tokens, ids in guesses.items())


def test_a_heads_chains_do_not_depend_on_the_old_content_of_its_buffer(monkeypatch):
    """Rows of tokens that already had keys used to be computed again from the buffer's old content,
    which made their keys wrong."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    found = []
    for value in (0.0, 50.0):
        engine = recorded(LLAMA, True, monkeypatch, **EAGLE3)
        guesses, propose = proposed(engine), engine.speculation.draft.propose

        def refilled(asks: Any, engine: Any = engine, value: Any = value, propose: Any = propose):
            engine.draft_model.hidden.fill_(value)
            return propose(asks)

        engine.speculation.draft.propose = refilled
        answers(engine, ASKED)
        found.append(guesses)
    assert len(found[0]) > 5 and found[0] == found[1]
