"""Speculation changes no bit: tokens, log-probabilities and ends are those of plain decoding.

Most tests run the same requests twice, plainly and with a draft, in batches of mixed parameters,
and show that drafts were accepted and rejected. Others test how deep to guess and when to rest.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lockstep import cli
from lockstep.attention import select
from lockstep.config import EngineConfig
from lockstep.kernels.cpu import threads
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.lab import speculative_bits
from lockstep.lab.speculative import CHAIN, EAGLE3, NGRAM, TREE, drafts, noisy
from lockstep.lab.tiny import (
    BART,
    CONTEXT,
    DEEPSEEK,
    GEMMA2,
    GPT_OSS,
    LLAMA,
    QWEN3,
    Tiny,
    loaded,
    parts,
    save,
    words,
)
from lockstep.llm.engine import Engine, Parts, load
from lockstep.llm.generation import Generation
from lockstep.llm.output import Speculated
from lockstep.models import loader
from lockstep.plan.bucket import Buckets
from lockstep.plan.build import RequestWork, build, slice_plan
from lockstep.plan.check import check
from lockstep.plan.step import StepPlan
from lockstep.run import runner as runner_module
from lockstep.run.kind import DRAFT, DRAFTS, GENERATE, VERIFY
from lockstep.run.runner import BoundRows, Runner, StepOutput
from lockstep.run.tape import Tape
from lockstep.sample.formulas import counter
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import noise_of
from lockstep.sched.request import DraftTree
from lockstep.spec import draft_model, model_draft
from lockstep.spec.depth import LONG_REST, LONGEST_REST, NEAR, REST, SEEN, Acceptance, Costs
from lockstep.spec.draft import NO_DRAFT, DraftRequest, DraftSetup
from lockstep.spec.speculation import FIRST_TRY
from lockstep.spec.verify import NodeRows, verify
from lockstep.types import RuleError

PLAIN = SamplingParams(max_tokens=24, temperature=0, logprobs=2, ignore_eos=True)
WISHES = (
    PLAIN,
    replace(PLAIN, temperature=0.7, seed=1),
    replace(
        PLAIN,
        temperature=1.0,
        seed=2,
        top_p=0.9,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
    ),
    replace(PLAIN, temperature=1.0, seed=3, n=3, logprobs=None),
    replace(PLAIN, min_tokens=9, ignore_eos=False, stop_token_ids=(5, 9, 11), top_k=9, seed=4),
    replace(PLAIN, temperature=0.4, seed=5, min_p=0.1, logit_bias={3: 4.0}, logprobs=0),
    replace(PLAIN, stop=("th", "e"), temperature=0.5, seed=6),
    replace(PLAIN, speculative=False),
    replace(PLAIN, temperature=0.3, seed=8, prompt_logprobs=1),
)


def made(tiny: Tiny, overlap: bool = False, **options: Any) -> Engine:
    """Returns an engine whose draft is its own model with noise on the weights."""
    model = replace(parts(tiny, select.load("cpu")), draft=drafts(tiny))
    names = {"context_length": CONTEXT, "max_total_tokens": 2000, "page_size": 4, **options}
    engine = Engine(EngineConfig.from_names(names), model, overlap)
    if engine.speculation is not None:
        engine.speculation.adaptive = False
    return engine


def prompts() -> list[tuple[int, ...]]:
    """Returns prompts: some whose text repeats, some that share a prefix."""
    block, stem = words(7, 1), words(21, 2)
    repeating = [block * 3 + block[:2], block * 2, (4, 5) * 9]
    return [*repeating, *(stem + words(n, n) for n in (1, 2, 3)), words(40, 5), stem, (3,)]


def answers(engine: Engine) -> tuple[list[Any], Speculated]:
    """Runs all requests. Returns the bits of every answer, and the counts of drafted and accepted
    tokens."""
    jobs = [engine.add(prompt, wish) for prompt, wish in zip(prompts(), WISHES, strict=True)]
    run(engine)
    outputs = [job.output("") for job in jobs]
    counts = [output.speculated for output in outputs]
    return [bits(job) for job in jobs], Speculated(*map(sum, zip(*counts, strict=True)))


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()
    engine.check()


def bits(job: Generation) -> list[Any]:
    """Returns everything that plain decoding gives, as comparable values."""
    output = job.output("")
    scores = output.prompt_logprobs
    return [
        None if scores is None else scores.tobytes(),
        *(
            (
                c.token_ids,
                c.text,
                c.finish_reason,
                None if c.logprobs is None else c.logprobs.tobytes(),
                c.top_logprobs,
            )
            for c in output.completions
        ),
    ]


def judge(tiny: Tiny, least: int = 5, **options: Any) -> None:
    """Checks that an engine with these options answers as it does without speculation, with at
    least `least` draft tokens accepted and as many rejected."""
    plain = {k: v for k, v in options.items() if not k.startswith("speculative")}
    want, nothing = answers(made(tiny, **plain))
    got, counts = answers(made(tiny, **options))
    assert nothing == Speculated()
    assert counts.accepted >= least and counts.drafted - counts.accepted >= least, counts
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert mine == theirs, f"request {i}: {WISHES[i]}"


@pytest.mark.parametrize("how", [CHAIN, TREE], ids=["chain", "tree"])
def test_nan_logits_after_the_last_token_end_a_request_that_has_a_draft(how):
    engine, poison = made(LLAMA, **how), 50
    kind = engine.kinds[GENERATE]

    def poisoned(ids, positions, step):
        hidden = kind.forward(ids, positions, step).clone()
        hidden[ids == poison] = torch.nan
        return hidden

    engine.kinds[GENERATE] = replace(kind, forward=poisoned)
    job = engine.add(prompts()[0], replace(PLAIN, logit_bias={poison: 100.0}))
    run(engine)
    (completion,) = job.output("").completions
    assert (completion.token_ids, completion.error) == ((poison,), "a logit is NaN")
    assert completion.logprobs is not None and len(completion.logprobs) == 1


@pytest.mark.parametrize("how", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_nan_logit_past_the_last_wanted_token_is_no_error(how):
    engine, prompt = made(LLAMA, **how), prompts()[0]
    kind, shape = engine.kinds[GENERATE], engine.speculation.shape
    engine.runner.buckets = Buckets.for_decoding(2, 0, 0, shape.widths)  # drafts go past the end

    def poisoned(ids, positions, step):
        hidden = kind.forward(ids, positions, step).clone()
        hidden[positions > len(prompt)] = torch.nan
        return hidden

    engine.kinds[GENERATE] = replace(kind, forward=poisoned)
    wish = replace(PLAIN, logit_bias={50: 100.0}, max_tokens=2)
    two, three = engine.add(prompt, wish), engine.add(prompt, replace(wish, max_tokens=3))
    run(engine)
    ends = [(job.output("").token_ids, job.output("").finish_reason) for job in (two, three)]
    assert ends == [((50, 50), "length"), ((50, 50), "error")]


@pytest.mark.parametrize("tiny", [LLAMA, QWEN3, DEEPSEEK, GPT_OSS, GEMMA2], ids=lambda t: t.name)
@pytest.mark.parametrize("how", [NGRAM, CHAIN, TREE], ids=["ngram", "chain", "tree"])
def test_speculative_answers_have_the_bits_of_plain_decoding(tiny, how):
    judge(tiny, **how)


@pytest.mark.parametrize("how", [NGRAM, CHAIN, TREE], ids=["ngram", "chain", "tree"])
@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 5},
        {"max_running_requests": 2},
        {"max_total_tokens": 96, "chunked_prefill_size": 16},
        {"disable_radix_cache": True, "page_size": 1},
        {"page_size": 16, "overlap": True},
        {"overlap": True, "max_total_tokens": 112, "page_size": 2},
        {"bucket_sizes": (1, 2, 4, 8, 16, 32, 64, 512)},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items())[:40],
)
def test_no_engine_option_changes_the_bits_of_speculative_answers(how, options):
    judge(QWEN3, least=1, **how, **options)


def test_an_accepted_path_continues_while_the_draft_token_is_the_sample():
    draft = NodeRows(2, (7, 8, 9, 8, 4), (-1, 0, 0, 1, 3))
    sampled = [1, 3, 8, 8, 5, 4, 6]
    found = verify([0, 1, 2], {2: draft}, sampled, {})
    assert found.token_ids == {2: (8, 8, 4, 6)} and found.nodes == {2: (0, 1, 3, 4)}


def test_an_error_after_accepted_tokens_ends_the_path_before_it():
    draft = NodeRows(0, (7, 8, 9), (-1, 0, 1))
    found = verify([0], {0: draft}, [8, -1, 4], {1: "NaN", 2: "of no interest"})
    assert found.token_ids == {0: (8,)} and found.nodes == {0: (0,)} and found.errors == {0: "NaN"}
    assert verify([0, 1], {}, [8, -1], {1: "NaN"}).errors == {1: "NaN"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculative_algorithm": "magic"}, "ngram, draft, eagle, eagle3; got 'magic'"),
        ({"speculative_num_steps": 3}, "is given only with speculative_algorithm; got 3"),
        ({**NGRAM, "speculative_eagle_topk": 2}, "one chain from the text"),
        ({**NGRAM, "speculative_eagle_topk": 0}, "a whole number from 1"),
        ({"speculative_algorithm": "draft"}, "needs speculative_draft_model; got none"),
        ({**CHAIN, "speculative_num_draft_tokens": 1}, "at least one draft token; got 1"),
        ({**TREE, "speculative_num_draft_tokens": 23}, "from 3 to 21 draft tokens"),
        ({**CHAIN, "speculative_num_steps": 10**9}, "at most 1,024 tokens.* got 1,000,000,000 "),
        ({**TREE, "speculative_eagle_topk": 1025}, "3 levels of 1,025. Ask for fewer"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(RuleError, match=said):
        made(LLAMA, **options)


def test_an_encoder_decoder_does_not_speculate():
    with pytest.raises(RuleError, match="continues a decoder's text; got an encoder-decoder"):
        made(BART, **NGRAM)


def test_a_model_for_embeddings_does_not_speculate():
    made = parts(LLAMA, select.load("cpu"))
    silent = replace(made, model=replace(made.model, head=None))
    with pytest.raises(RuleError, match="continues a decoder's text; got a model for embeddings"):
        Engine(EngineConfig.from_names({"context_length": CONTEXT, **NGRAM}), silent)


def test_a_draft_model_that_does_not_fit_into_memory_is_refused(tmp_path, monkeypatch):
    """It is refused before its weights are read, so a start with the target alone loses nothing."""

    class Card:
        device, dtype = torch.device("cuda"), torch.bfloat16

    asked = loader.check_room
    monkeypatch.setattr(loader, "check_room", lambda _, elements: asked(Card(), elements))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    save(LLAMA, tmp_path)
    config = EngineConfig.from_names({**CHAIN, "speculative_draft_model": str(tmp_path)})
    with pytest.raises(RuleError, match="weights fit into the 1,000 B that are free"):
        draft_model.load(DraftSetup(config.settled("float32"), loaded(LLAMA), 0, 8))


def test_a_draft_model_with_another_vocabulary_is_refused():
    small = Tiny("small", "", "llama", {**LLAMA.config, "vocab_size": 40})
    model = replace(
        parts(LLAMA, select.load("cpu")),
        draft=lambda setup: draft_model.of(noisy(small, 0.0), setup),
    )
    with pytest.raises(RuleError, match="the vocabulary of its target, 61 tokens; got 40"):
        Engine(EngineConfig.from_names({"context_length": CONTEXT, **CHAIN}), model)


def test_every_token_of_the_context_may_be_drafted_and_none_past_its_end():
    """A draft ends where the context does."""
    wish = replace(PLAIN, max_tokens=None)
    plain, drafted = made(LLAMA), made(LLAMA, **NGRAM)
    jobs = [engine.add((4, 5) * 9, wish) for engine in (plain, drafted)]
    for engine in (plain, drafted):
        run(engine)
    assert bits(jobs[0]) == bits(jobs[1])
    assert len(jobs[1].completions[0].token_ids) == CONTEXT - 18


@pytest.mark.parametrize("how", [NGRAM, CHAIN, TREE], ids=["ngram", "chain", "tree"])
def test_a_request_with_one_token_left_is_not_drafted_and_does_not_stop_other_drafts(how):
    engine, asked = made(LLAMA, **how), []
    jobs = [engine.add((4, 5) * 9, replace(PLAIN, max_tokens=most)) for most in (2, 9)]
    propose = engine.speculation.draft.propose

    def watched(asks: Any) -> Any:
        asked.append([(ask.request, ask.steps > 0) for ask in asks])
        return propose(asks)

    engine.speculation.draft.propose = watched
    engine.step()
    assert [job.request.left for job in jobs] == [1, 8]
    engine.step()
    assert asked == [[(jobs[1].request, True)]]
    run(engine)
    assert jobs[0].output("").speculated == Speculated()


@pytest.mark.parametrize("how", [NGRAM, TREE], ids=["ngram", "tree"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_aborted_with_draft_nodes_gives_every_page_back(how, overlap):
    engine = made(QWEN3, overlap, disable_radix_cache=True, **how)
    jobs = [engine.add(prompt, PLAIN) for prompt in prompts()[:3]]
    for count in range(14):
        engine.step()
        if count in (7, 9):
            engine.abort(jobs[count - 7])
            engine.check()
    run(engine)
    pools = [pool for pool in engine.scheduler.pools if pool is not None]
    assert all(pool.free == pool.num_pages - 1 for pool in pools)


def test_an_output_counts_drafted_and_accepted_tokens_and_verify_steps():
    engine = made(LLAMA, **NGRAM)
    job = engine.add((4, 5) * 9, PLAIN)
    run(engine)
    counts = job.output("").completions[0].speculated
    assert counts == Speculated(drafted=16, accepted=16, verify_steps=4)


def test_the_noise_of_some_tokens_is_theirs_in_the_whole_vocabulary():
    counters = torch.tensor([counter(7, 0, 12), counter(-3, 2, 40)])
    ids = torch.tensor([[0, 5, 60], [59, 1, 2]])
    every = noise_of(counters, torch.arange(61).expand(2, -1))
    assert torch.equal(noise_of(counters, ids), every.gather(1, ids))


def costs(plain_s: float, wide_s: float, draft_s: float = 0.0) -> Costs:
    """Returns measured costs of a request that decodes alone: plain steps, steps that verify four
    guesses, and drafts of four."""
    out = Costs()
    for _ in range(SEEN):
        out.step(0, plain_s)
        out.step(4, wide_s)
        out.draft.add(4, draft_s)
    return out


def right(share: float) -> Acceptance:
    """Returns the record of two drafts of five guesses, of which this share was right."""
    return Acceptance(drafts=2.0, guesses=10.0, tried=10.0, right=10 * share)


@pytest.mark.parametrize(
    ("share", "seconds", "depth"),
    [
        (0.9, (1.0, 1.2), 4),  # rows cost little
        (0.5, (1.0, 2.0), 1),  # the second guess is worth a quarter of a token, as its row costs
        (0.1, (1.0, 2.0), 0),
        (0.9, (1.0, 1.2, 3.5), 0),  # the draft costs more than it yields
        (0.9, (1.0, 1.2, 0.5), 4),
    ],
)
def test_drafts_are_as_deep_as_it_pays(share, seconds, depth):
    assert costs(*seconds).depths([right(share)], 4, 4) == [depth]


def test_the_time_of_a_trial_counts_only_below_the_estimate():
    """Times of trials used to be ignored: a draft that was slow once was taken to be slow
    permanently, and a request that was always right rested. A trial starts cold, so a longer time
    proves nothing."""
    seen = costs(1.0, 1.8, 0.5)
    for _ in range(9):
        seen.draft.add(4, 9.0, trial=True)
    assert seen.draft.y == pytest.approx(0.5)
    for _ in range(30):
        seen.draft.add(4, 0.1, trial=True)
    assert seen.draft.y == pytest.approx(0.1, rel=0.01)


def test_a_clock_that_stands_still_or_goes_back_measures_nothing():
    """A plain step of 0 s used to stay a divisor of 0 from then on; a negative one grew without
    bound."""
    seen = Costs()
    for seconds in (0.0, -1.0, 0.0, 0.0):
        seen.step(0, seconds)
        seen.step(4, seconds)
    assert not seen.plain.known and not seen.verify.known
    for _ in range(SEEN):
        seen.step(0, 1.0)
        seen.step(0, 0.0)
    assert seen.plain.y == 1.0


def test_a_step_of_unknown_cost_is_tried():
    seen = Costs()
    assert seen.depths([Acceptance()], 4, 4) == [0], "a plain step"
    assert seen.pays([Acceptance()]) == [False]
    for _ in range(SEEN):
        seen.step(0, 1.0)
    assert seen.depths([Acceptance()], 4, 4) == [4], "a wide one"
    assert seen.pays([Acceptance()]) == [True]


def test_a_draft_of_variable_length_is_used_while_it_yields_more_than_it_costs():
    """Five guesses per draft. At any depth, verifying costs half a step extra and drafting a
    quarter."""
    seen = costs(1.0, 1.5 + 0.4, 0.25 + 0.8)
    for _ in range(SEEN):
        seen.step(2, 1.5 + 0.2)
        seen.draft.add(2, 0.25 + 0.4)
    assert seen.row_s == pytest.approx(0.1) and seen.guess_s == pytest.approx(0.2)
    assert seen.first_s == pytest.approx(0.75) and seen.min_chance() == pytest.approx(0.3)
    each = 5 * 0.3 + 0.75  # the cost of a draft, in tokens
    assert seen.pays([right(each / 5 + 0.01)]) == [True]
    assert seen.pays([right(each / 5 - 0.01)]) == [False]


def test_slices_of_the_plan_of_a_chain_are_the_plans_of_its_steps():
    specs = loaded(LLAMA).model.groups(4)
    groups = CacheGroups(specs, [PagePool(32) for _ in specs])
    tables = [PageTable(groups), PageTable(groups)]
    for table in tables:
        table.reserve(16)

    def planned(lens: tuple[int, ...], width: int) -> StepPlan:
        views = [table.views(tuple(range(len(specs)))) for table in tables]
        return build(specs, [RequestWork(n, width, own) for n, own in zip(lens, views)])

    one, two = model_draft.shape_of((1, 1)), model_draft.shape_of((2, 2))
    ragged = model_draft.shape_of((3, 1))
    for shape, positions in ((two, [5, 6, 9, 10]), (ragged, [5, 6, 7, 9])):
        first = slice_plan(planned((5, 9), 4), shape)
        assert first.positions.tolist() == positions
        ends = [positions[row] + 1 for row in shape.q_indptr[1:] - 1]
        assert first.groups[0].kv_lens.tolist() == ends and first.bucket.width == shape.width
        check(first, (32,) * len(specs))
    last = slice_plan(planned((5, 9), 4), one, ragged.new_lens - 1)
    assert last.positions.tolist() == [7, 9]
    for nth in range(4):
        step, alone = slice_plan(planned((5, 9), 4), one, nth), planned((5 + nth, 9 + nth), 1)
        check(step, (32,) * len(specs))
        pairs = [(step, alone, ("q_indptr", "positions", "start", "tail_indptr", "emit"))]
        groups_of = zip(step.groups, alone.groups, strict=True)
        pairs += [(*each, ("kv_lens", "write_slots", "first_pos")) for each in groups_of]
        for mine, theirs, names in pairs:
            for name in names:
                assert getattr(mine, name).tolist() == getattr(theirs, name).tolist(), name
    with pytest.raises(RuleError, match="plain rows of every request"):
        slice_plan(build(specs, []), one)


def test_a_tree_with_more_branches_than_nodes_fits_into_named_buckets():
    """A level of a draft has top-k rows, though the tree keeps fewer nodes: with named bucket sizes
    every step failed."""
    sizes = {"bucket_sizes": (64,), "chunked_prefill_size": 64, "max_running_requests": 20}
    tree = {"speculative_num_steps": 2, "speculative_eagle_topk": 8}
    options = {**EAGLE3, **tree, "speculative_num_draft_tokens": 3, "max_total_tokens": 4000}
    engine = made(LLAMA, **sizes, **options)
    plain = made(LLAMA, max_running_requests=20, max_total_tokens=4000)
    found = []
    for each in (plain, engine):
        jobs = [each.add(words(4, n), replace(PLAIN, max_tokens=24)) for n in range(20)]
        run(each)
        found.append([bits(job) for job in jobs])
    assert found[0] == found[1] and sum(job.output("").speculated.drafted for job in jobs) > 0


@pytest.mark.parametrize("how", [CHAIN, EAGLE3], ids=["chain", "eagle3"])
def test_a_chain_that_cannot_be_recorded_runs_once(how, monkeypatch):
    """After the refusal the chain used to run again although its rows had already advanced, and
    gave other guesses."""
    computed, kinds, wish = Runner._compute, list[str](), replace(PLAIN, temperature=1.0, seed=2)

    def asking(self: Runner, rows: BoundRows) -> StepOutput:
        kinds.append(rows.kind.name)
        if kinds[-2:] == [DRAFT, DRAFT] and isinstance(threads.OWN.tape, Tape):
            torch.ones(1).item()
        return computed(self, rows)

    monkeypatch.setattr(Runner, "_compute", asking)
    monkeypatch.setattr(runner_module, "STEADY", dict.fromkeys((*DRAFTS, GENERATE, VERIFY), 0))
    found = []
    for graphs in (False, None):
        engine, trees = made(LLAMA, graphs=graphs, **how), []
        engine.speculation.draft.propose = partial(watched, engine.speculation.draft.propose, trees)
        for prompt in prompts():
            engine.add(prompt, wish)
        run(engine)
        found.append(trees)
    assert found[0] == found[1] and not engine.runner.graphs


def watched(propose: Any, trees: list[Any], asks: Any) -> Any:
    trees.append(propose(asks))
    return trees[-1]


def test_only_the_hidden_states_of_the_last_two_rows_of_a_prompt_are_kept(monkeypatch):
    """The whole chunk used to stay alive for as long as a request rested."""
    monkeypatch.setattr(model_draft, "SPARSE", 4)
    engine = made(LLAMA, **EAGLE3)
    engine.add(words(12, 3), PLAIN)
    engine.step()
    state = engine.scheduler.running[0].table.draft_state
    assert (state.begin, state.rows) == (10, (0, 1)) and [*map(len, state.hidden)] == [2, 2]


@pytest.mark.parametrize("tokens", [1, 2], ids=["a prompt alone", "a request that may speculate"])
def test_a_request_that_decodes_beside_prompts_keeps_none_of_their_states(tokens, monkeypatch):
    """A resting request used to keep whole steps alive, one for each prompt that arrived."""
    monkeypatch.setattr(model_draft, "SPARSE", 16)
    engine = made(LLAMA, **EAGLE3)
    engine.speculation._wanted = lambda scheduler: {}
    job = engine.add(words(5, 1), PLAIN)
    for number in range(6):
        engine.step()
        engine.add(words(30, number), replace(PLAIN, max_tokens=tokens))
    engine.step()
    state = job.request.table.draft_state
    steps = {id(each): len(each) for each in state.hidden}
    assert len(state.hidden) == 8 and sum(steps.values()) < 30, steps
    assert all(row < len(step) for step, row in zip(state.hidden, state.rows, strict=True))


def test_a_new_request_begins_with_the_overall_acceptance_rate_and_soon_has_its_own():
    all_of_them = Acceptance()
    for _ in range(50):
        all_of_them.verified(drafts=1, guesses=4, tried=1, right=0)
    all_of_them.rests(settled=100)
    new = all_of_them.for_new_request()
    assert new.rate == pytest.approx(all_of_them.rate) and new.rate < 0.05
    assert (new.rest, new.rests_until) == (2 * REST, 100 + REST)
    new.verified(drafts=1, guesses=4, tried=4, right=4)
    assert new.rate > 0.5


def test_a_request_whose_drafts_are_mostly_wrong_rests_longest():
    some, none = Acceptance(), Acceptance()
    for step in range(40):
        some.verified(1, 1, 1, step % 4 > 0)
        none.verified(1, 1, 1, 0)
        for each in (some, none):
            each.rests(settled=0)
            assert each.resting(0) and not each.resting(each.rests_until)
    assert (some.rest, none.rest) == (LONG_REST, LONGEST_REST)


def test_a_request_whose_drafts_yield_far_less_than_they_cost_rests_longest():
    near, far = right(0.8), right(0.6)  # five guesses, which cost as much as 4.5 plain tokens
    costs(1.0, 1.8, 3.5).pays([near, far])
    assert NEAR < near.worth < 1 and far.worth < NEAR and far.rate > 0.5
    for _ in range(9):
        for each in (near, far):
            each.rests(settled=0)
    assert (near.rest, far.rest) == (LONG_REST, LONGEST_REST)


def test_acceptance_measured_after_a_rest_counts_for_more():
    """Fifty drafts of four guesses, one of them right in each, then a draft that is wholly right.
    That one used to be outweighed by the others, and the request rested although its text had
    become easy."""
    seen, acceptance = costs(1.0, 1.8, 1.0), Acceptance()
    for _ in range(50):
        acceptance.verified(1, 4, 2, 1)
    assert seen.pays([acceptance]) == [False]
    patient = replace(acceptance)
    acceptance.rests(settled=0)
    for each in (patient, acceptance):
        each.verified(1, 4, 4, 4)
    assert seen.pays([patient, acceptance]) == [False, True]


def test_after_an_interruption_a_draft_is_notified_of_no_earlier_step():
    """Steps are numbered from the start again then, and steps that embed have numbers too. The
    draft used to be passed rows of requests that no longer existed, and the times of steps that
    embed were kept permanently."""
    plain, engine = made(LLAMA), made(LLAMA, **CHAIN)
    want, job = [each.add((4, 5) * 9, PLAIN) for each in (plain, engine)]
    speculation = engine.speculation
    speculation._rests = lambda acceptance, settled: True
    for _ in range(4):
        engine.step()
    assert len(speculation._unobserved) == 3 and speculation._first is not None
    engine._changing = True  # an interrupt struck
    told, tell = [], speculation.draft.observe
    speculation.draft.observe = lambda settled: (told.append(settled), tell(settled))
    engine.add((7, 8, 9), embed=True)
    for each in (plain, engine):
        while each.busy:
            each.step()
    assert told[0].rows[0].begin == 0, "the prompt, once more"
    assert speculation._begins == {}
    assert job.completions[0].token_ids == want.completions[0].token_ids


def test_a_request_whose_drafts_pay_again_rests_as_shortly_as_at_first():
    """Being right sometimes is not enough: the rests of a request whose guesses do not pay keep
    growing."""
    engine = made(LLAMA, **NGRAM)
    engine.add((4, 5) * 9, PLAIN)
    for _ in range(2):
        engine.step()
    speculation, (request,) = engine.speculation, engine.scheduler.running
    speculation.adaptive, acceptance = True, speculation._acceptance_of(request)
    acceptance.rest = 4 * REST
    speculation.costs[1] = costs(1.0, 4.0)
    assert speculation._wanted(engine.scheduler) == {} and acceptance.rest == 8 * REST
    engine.scheduler.settled = acceptance.rests_until
    speculation.costs[1] = costs(1.0, 1.1)
    assert speculation._wanted(engine.scheduler) == {request: 4}
    assert (acceptance.rest, acceptance.rests_until) == (REST, 0)


def test_a_new_request_has_its_own_try_unless_a_try_has_just_failed():
    """It used to inherit the rest of the request before it, up to 1,024 steps: text that is easy to
    guess got no guesses after text that is not."""
    engine = made(LLAMA, **NGRAM)
    engine.add((4, 5) * 9, PLAIN)
    for _ in range(2):
        engine.step()
    speculation, scheduler = engine.speculation, engine.scheduler
    speculation.adaptive, speculation.costs[1] = True, costs(1.0, 4.0)
    (first,) = scheduler.running
    speculation._acceptance_of(first).rest = LONGEST_REST
    failed = scheduler.settled
    for _ in range(2):  # the first starts the request's rest, the second that of all
        assert speculation._wanted(scheduler) == {}
    run(engine)
    assert speculation._rests(speculation._acceptance, scheduler.settled), "it would have gone on"
    engine.add((6, 5) * 9, PLAIN)
    for _ in range(2):
        engine.step()
    (second,) = scheduler.running
    assert speculation._acceptance_of(second).rests_until == failed + FIRST_TRY
    assert speculation._wanted(scheduler) == {}
    scheduler.settled = failed + FIRST_TRY
    assert speculation._wanted(scheduler) == {second: 1}, "a try"


def test_a_new_request_has_a_try_after_a_request_that_ended_in_a_try():
    """A request with one token left guesses nothing. That it had never rested was taken for a rest
    of all requests, and the next request rested up to 1,024 steps without a try."""
    engine = made(LLAMA, **NGRAM)
    engine.add((4, 5) * 9, replace(PLAIN, max_tokens=3))
    speculation, scheduler = engine.speculation, engine.scheduler
    while not scheduler.running or scheduler.running[0].left > 1:
        engine.step()
    (first,), failed = scheduler.running, scheduler.settled
    speculation.adaptive, speculation.costs[1] = True, costs(1.0, 4.0)
    speculation._acceptance_of(first).rests_until = 0
    speculation._acceptance.rests_until = speculation._first_try = failed
    assert speculation._wanted(scheduler) == {}
    run(engine)
    engine.add((6, 5) * 9, PLAIN)
    engine.step()
    (second,) = scheduler.running
    assert speculation._wanted(scheduler) == {second: 1}, "a try"


def test_after_an_interruption_rests_are_as_short_as_at_first():
    """A request that continued used to rest immediately, for the longest rest reached before."""
    engine = made(LLAMA, **NGRAM)
    engine.add((4, 5) * 9, PLAIN)
    engine.step()
    speculation = engine.speculation
    speculation._acceptance.rest, engine._changing = LONGEST_REST, True  # an interrupt struck
    for _ in range(2):
        engine.step()
    scheduler = engine.scheduler
    speculation.adaptive, speculation.costs[1] = True, costs(1.0, 4.0)
    (request,) = scheduler.running
    assert scheduler.counters["recovered"] == 1 and speculation._wanted(scheduler) == {}
    assert speculation._acceptance_of(request).rests_until == scheduler.settled + REST


def guided(prompts: Sequence[tuple[int, ...]], wish: SamplingParams, wrong: Container[int] = ()):
    """Returns an engine that decodes `prompts` together, with drafts that are always right but for
    the prompts numbered in `wrong`; and a list to which each step adds the set of prompt numbers
    asked for."""
    want = []
    for prompt in prompts:
        plain = made(LLAMA)
        job = plain.add(prompt, wish)
        run(plain)
        want.append(job.completions[0].token_ids)
    engine, asked = made(LLAMA, **NGRAM), list[set[int]]()
    speculation = engine.speculation
    speculation.adaptive, speculation._report = True, None
    numbers = {prompt: number for number, prompt in enumerate(prompts)}

    def tree(ask: DraftRequest) -> DraftTree:
        number = numbers[ask.request.spec.prompt]
        begin = len(ask.request.tokens) - len(ask.request.spec.prompt)
        ids = want[number][begin : begin + ask.steps]
        asked[-1].add(number)
        return DraftTree(
            tuple(60 if number in wrong else token for token in ids), tuple(range(len(ids)))
        )

    speculation.draft.propose = lambda asks: [tree(ask) for ask in asks]
    return engine, asked


def test_requests_whose_drafts_are_right_are_drafted_although_others_rest():
    """Times were stored by the number of requests that decode, but looked up by the number of those
    that do not rest. As soon as one rested nothing was known, and drafts were only tried now and
    then."""
    every = [words(9, n) for n in range(4)]
    wish = replace(PLAIN, max_tokens=140)
    engine, asked = guided(every, wish, wrong=(2, 3))
    seen = engine.speculation.costs[4] = costs(1.0, 1.6)
    seen.step = lambda depth, seconds, warmth: None
    jobs = [engine.add(prompt, wish) for prompt in every]
    while not all(job.done for job in jobs[:2]):
        asked.append(set())
        engine.step()
    assert sum({0, 1} <= each for each in asked) > 0.7 * len(asked), asked
    late = asked[len(asked) // 2 :]  # by then prompts 2 and 3 are known to be wrong
    assert sum(bool(each & {2, 3}) for each in late) < 0.3 * len(late), asked


def test_once_drafts_of_a_new_request_are_right_every_step_drafts():
    """It used to be drafted for in one step of eight for as long as the previous one would have
    rested."""
    (prompt,), wish = [words(9, 1)], replace(PLAIN, max_tokens=100)
    engine, asked = guided([prompt], wish)
    speculation, settled = engine.speculation, 300
    speculation.costs[1] = costs(1.0, 1.2)
    speculation.costs[1].step = lambda depth, seconds, warmth: None
    engine.scheduler.settled = settled
    speculation._acceptance.rests_until = settled + 600
    speculation._first_try = settled
    engine.add(prompt, wish)
    while engine.busy:
        asked.append(set())
        engine.step()
    first = asked.index({0})
    assert first <= 10 and all(asked[first:-1]), asked


def test_the_fixed_cost_of_a_draft_is_shared_only_by_the_requests_that_draft():
    """A verify of any depth costs half a step extra: one guessing request of two does not earn
    that, both together do."""
    seen = costs(1.0, 1.5)
    for _ in range(SEEN):
        seen.step(2, 1.5)
    assert seen.row_s < 0.01 and seen.first_s == pytest.approx(0.5, abs=0.03)
    always = Acceptance(drafts=1.0, guesses=1.0, tried=1.0, right=0.8)
    assert seen.pays([always]) == [True] and seen.pays([always], share=0.5) == [False]
    assert seen.depths([always], 1, 1) == [1] and seen.depths([always], 1, 1, share=0.5) == [0]


def test_one_step_that_waited_for_a_prompt_does_not_make_drafts_costly():
    """That step used to weigh four times as much as the others, and drafts that paid rested after
    it."""
    seen = costs(1.0, 3.7)
    assert seen.depths([right(0.75)], 4, 4) == [1]
    seen.step(4, 100.0)
    assert seen.depths([right(0.75)], 4, 4) == [1]


def test_completions_of_a_prompt_in_chunks_are_drafted_by_a_head():
    """They had none: only the parent kept the state of the row before the last chunk."""
    engine, asked = made(LLAMA, **EAGLE3, chunked_prefill_size=24), dict[int, list[bool]]()
    propose = engine.speculation.draft.propose

    def watched(asks):
        trees = propose(asks)
        for ask, tree in zip(asks, trees, strict=True):
            asked.setdefault(ask.request.index, []).append(len(tree.token_ids) > 0)
        return trees

    engine.speculation.draft.propose = watched
    engine.add(words(30, 3), replace(PLAIN, n=3, temperature=1.0, seed=3))
    run(engine)
    assert asked.keys() == {0, 1, 2} and all(map(all, asked.values())), asked


def test_while_all_requests_rest_none_is_drafted_and_few_steps_are_timed():
    engine = made(LLAMA, **NGRAM)
    speculation, asked, timed = engine.speculation, [], []
    engine.add((4, 5) * 9, replace(PLAIN, max_tokens=60))
    engine.add((6, 5) * 9, replace(PLAIN, max_tokens=60))
    while len(engine.scheduler.running) < 2 or not all(r.decodes for r in engine.scheduler.running):
        engine.step()
    speculation.adaptive, settled = True, engine.scheduler.settled
    for request, rest in zip(engine.scheduler.running, (24, 30), strict=True):
        speculation._acceptance_of(request).rests_until = settled + rest
    speculation.costs[2] = costs(1.0, 4.0)
    speculation.costs[2].step = lambda *each: timed.append(1)
    speculation.draft.propose = lambda asks: asked.append(len(asks)) or [NO_DRAFT] * len(asks)
    for _ in range(17):
        engine.step()
    assert speculation._acceptance.rests_until == settled + 24, "until the first tries"
    assert not asked and 2 <= len(timed) <= 4, timed
    for _ in range(8):
        engine.step()
    assert asked, "who has rested is asked again"
    speculation._acceptance.rests_until = engine.scheduler.settled + 200
    speculation.adaptive = False
    asked.clear()
    engine.step()
    assert asked, "whose depth is fixed does not rest"


def test_a_try_that_is_due_waits_for_a_request_that_speculates():
    engine = made(LLAMA, **NGRAM)
    speculation = engine.speculation
    speculation.adaptive, speculation._acceptance.rests_until = True, 1
    engine.add((4, 5) * 9, replace(PLAIN, max_tokens=30, speculative=False))
    while engine.busy:
        engine.step()
    assert speculation._acceptance.rests_until == 1


def test_a_request_whose_drafts_are_never_right_rests_longer_and_longer_and_tries_again():
    engine = made(LLAMA, **NGRAM)
    speculation = engine.speculation
    speculation.adaptive, said = True, []
    speculation._report = said.append
    speculation.costs[1] = costs(1.0, 4.0)
    speculation.costs[1].step = lambda depth, seconds, warmth: None
    wrong = DraftTree((60, 60), (0, 1))
    asked: list[int] = []

    def propose(asks):
        asked.extend(len(ask.request.tokens) for ask in asks)
        return [wrong] * len(asks)

    speculation.draft.propose = propose
    job = engine.add((3, 9), replace(PLAIN, max_tokens=140))
    plain = made(LLAMA)
    same = plain.add((3, 9), replace(PLAIN, max_tokens=140))
    run(engine)
    run(plain)
    assert bits(job) == bits(same)
    late = [n for n in asked if n > 40]
    assert 0 < len(late) <= 6 and len(said) == 1, (asked, said)
    assert "decoding plainly" in said[0]


@pytest.fixture(scope="module")
def sixteen() -> tuple[Parts, list[Any], list[Any]]:
    """Returns the built-in model, sixteen prompts at three temperatures, and their plain
    answers."""
    parts = load(EngineConfig())
    requests = speculative_bits.wanted(range(16))
    return parts, requests, speculative_bits.answers(parts, requests, {})[0]


@pytest.mark.parametrize("draft", speculative_bits.DRAFTS)
def test_the_built_in_model_has_the_same_bits_with_any_draft(draft, sixteen, tmp_path):
    if draft.startswith("eagle3"):
        pytest.importorskip("lockstep.spec.eagle3")
    parts, requests, want = sixteen
    speculative_bits.noisy_folder(tmp_path)
    options = speculative_bits.options_of(draft, str(tmp_path))
    got, _ = speculative_bits.answers(parts, requests, options)
    found = {
        f"{draft}; {wish}": speculative_bits.compared(wish, requests, got, want)
        for wish in speculative_bits.WISHES
    }
    doc = speculative_bits.judged({"0": found})
    assert not doc["faults"], doc
    assert [column["tokens"] for column in doc["columns"]] == [16 * 64] * 3


def test_an_ended_run_of_lab_bits_continues_from_its_document(tmp_path, capsys):
    counts = {**dict.fromkeys(speculative_bits.COUNTS, 0), "tokens": 9, "drafted": 4, "accepted": 2}
    names = [f"ngram; {wish}" for wish in speculative_bits.WISHES]
    blocks = {"0": dict.fromkeys(names, counts), "16": dict.fromkeys(names, counts)}
    noise = {"noise": speculative_bits.NOISE, "noise_seed": speculative_bits.SEED}
    file = tmp_path / "bits.json"
    file.write_text(json.dumps({"prompts": 20, "drafts": ["ngram"], **noise, "blocks": blocks}))
    command = ["lab", "bits", "--speculative", "ngram", "--from", str(file), "--prompts"]
    assert cli.main([*command, "20", "--json", "-"]) == 0
    columns = json.loads(capsys.readouterr().out)["columns"]
    assert [column["accepted"] for column in columns] == [4, 4, 4]
    assert cli.main([*command, "21"]) == 2
    assert "the same prompts and drafts" in capsys.readouterr().err
