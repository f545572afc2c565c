"""Atomic steps: settled immediately or one step late, abandoned half way, failing, resumed. Every
answer has its bits, and no page is lost."""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.config import EngineConfig
from lockstep.lab import golden, interrupt
from lockstep.lab.tiny import BART, LLAMA, QWEN3
from lockstep.llm import engine as engine_module
from lockstep.llm.api import LLM
from lockstep.llm.calls import GC_PAUSES, pause_gc
from lockstep.llm.engine import Engine, load
from lockstep.llm.generation import CompletionState
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import Decoding
from lockstep.types import RuleError

PROMPT, OTHER = list(range(3, 25)), list(range(9, 21))
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, seed=3, logprobs=1)
PENALISED = replace(PARAMS, frequency_penalty=0.7, repetition_penalty=1.3)
SCORED = replace(PARAMS, prompt_logprobs=1, n=2)
STOPPED = replace(PARAMS, max_tokens=24, stop=("th", "e", "in"), min_tokens=3)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine(tiny=QWEN3, overlap=False, **options) -> Engine:
    made = interrupt.engine(tiny, **options)
    return Engine(made.config, made.parts, overlap)


def finished(engine, *jobs):
    while engine.busy:
        engine.step()
    return [interrupt.bits(job.output("")) for job in jobs]


def lone(params, prompt=PROMPT, tiny=QWEN3):
    calm = engine(tiny, disable_radix_cache=True, max_total_tokens=2048)
    job = calm.add(prompt, params)
    (bits,) = finished(calm, job)
    return job, bits


def test_a_decoding_request_is_inspected_at_most_twice_a_page_even_if_others_end(monkeypatch):
    """Once for the next page, and once when the keys of the last page have settled."""
    looks, look = [], Decoding.look

    def counted(members, request, pages, until_len):
        looks.append(request)
        look(members, request, pages, until_len)

    monkeypatch.setattr(Decoding, "look", counted)
    roomy = {"page_size": 8, "max_total_tokens": 2048, "max_running_requests": 16}
    late, count = engine(LLAMA, overlap=True, **roomy), 12
    params = [replace(PARAMS, max_tokens=20 + i, seed=i, ignore_eos=True) for i in range(count)]
    jobs = [late.add(PROMPT[: 5 + i], each) for i, each in enumerate(params)]
    bits = finished(late, *jobs)
    pages = sum((5 + 2 * i + 20) // 8 for i in range(count))
    assert len(looks) <= 2 * pages + count, "and once at the beginning"
    for i in (0, count - 1):
        assert bits[i] == lone(params[i], PROMPT[: 5 + i], LLAMA)[1]


# -- late settling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "bart"])
def test_recorded_answers_are_unchanged_when_steps_are_settled_late(name, tmp_path):
    recorded = json.loads((Path(__file__).parent / "golden.json").read_text())[golden.key()]
    config = EngineConfig.from_names(
        {"model": str(golden.model_folder(name, tmp_path)), **golden.CRAMPED}
    )
    llm = LLM.of(Engine(config, load(config), overlap=True))
    found = golden.ask(llm, golden.requests(name))
    assert len(found) == golden.REQUESTS
    assert [key for key, answer in found.items() if recorded[key] != answer] == []
    assert interrupt.check_idle(llm.engine) == []


@pytest.mark.parametrize("tiny", [QWEN3, BART], ids=lambda tiny: tiny.name)
def test_answers_settled_late_are_those_settled_immediately(tiny):
    """Forks, items, penalties, stop strings and scores in one engine that is short of pages."""
    scored = replace(SCORED, prompt_logprobs=None) if tiny is BART else SCORED
    answers = []
    for overlap in (False, True):
        made = engine(tiny, overlap)
        jobs = [made.add(PROMPT, each) for each in (scored, PENALISED, STOPPED)]
        jobs.append(made.add_items(OTHER, [[5], [6, 7, 8], [9, 5, 6, 7, 8]]))
        answers.append(finished(made, *jobs))
        assert interrupt.check_idle(made) == []
    assert answers[0] == answers[1]


def test_a_step_is_settled_when_the_next_one_has_been_launched():
    late, at_once = engine(overlap=True), engine()
    jobs = [each.add(OTHER, PARAMS) for each in (late, at_once)]
    for count in range(4):
        for each in (late, at_once):
            each.step()
        assert [len(job.completions[0].token_ids) for job in jobs] == [count, count + 1]
    assert finished(late, jobs[0]) == finished(at_once, jobs[1])


def test_a_stop_found_late_costs_one_discarded_row_and_no_page():
    want = lone(STOPPED, OTHER)[0].output("")
    assert want.finish_reason == "stop"
    rows, cached = [], []
    for overlap in (False, True):
        made = engine(overlap=overlap, max_total_tokens=512)
        seen = []
        inner = made.runner.run
        made.runner.run = lambda plan, ids, *how, inner=inner, seen=seen: (
            seen.append(len(ids)) or inner(plan, ids, *how)
        )
        job = made.add(OTHER, STOPPED)
        finished(made, job)
        out = job.output("")
        assert (out.text, out.token_ids, out.finish_reason) == (
            want.text,
            want.token_ids,
            want.finish_reason,
        )
        assert job.new_chunks()[-1].token_ids == want.token_ids
        rows.append(sum(seen))
        cached.append([pool.tree_refs.sum() for pool in made.scheduler.tree.groups.values()])
        assert interrupt.check_idle(made) == []
    assert rows[1] == rows[0] + 1 and cached[0] == cached[1]


def test_a_request_with_min_tokens_does_not_wait_and_one_with_a_penalty_does():
    made = engine(overlap=True, max_total_tokens=512)
    counts = replace(PARAMS, min_tokens=4)
    goes, waits = made.add(OTHER, counts), made.add(PROMPT[:9], PENALISED)
    while not made.busy or made.scheduler.running == []:
        made.step()
    lens = []
    for _ in range(4):
        made.step()
        lens.append((len(goes.completions[0].token_ids), len(waits.completions[0].token_ids)))
    assert lens == [(1, 1), (2, 1), (3, 2), (4, 2)]
    want = [lone(counts, OTHER)[1], lone(PENALISED, PROMPT[:9])[1]]
    assert finished(made, goes, waits) == want


@pytest.mark.parametrize("at", range(1, 8))
def test_an_abort_between_launch_and_settling_changes_no_other_request(at):
    made = engine(overlap=True)
    jobs = [made.add(PROMPT, SCORED), made.add(OTHER, PARAMS)]
    for _ in range(at):
        made.step()
    assert made._launched, "a step is on its way"
    made.abort(jobs[0])
    got = [completion.token_ids for completion in jobs[0].output("").completions]
    made.check()
    assert finished(made, jobs[1]) == [lone(PARAMS, OTHER)[1]]
    want = lone(SCORED)[0].output("").completions
    after = [completion.token_ids for completion in jobs[0].output("").completions]
    assert got == after == [c.token_ids[: len(ids)] for c, ids in zip(want, got, strict=True)]
    assert interrupt.check_idle(made) == []


def test_a_step_returns_no_request_that_had_ended_before_it():
    """Their rows were launched before the end was known."""
    made = engine(overlap=True, max_total_tokens=512)
    stops, gone = made.add(OTHER, STOPPED), made.add(PROMPT[:7], replace(PARAMS, max_tokens=30))
    goes, touched = made.add(PROMPT[:9], replace(PARAMS, max_tokens=40, ignore_eos=True)), []
    while made.busy:
        done = [job for job in (stops, gone, goes) if job.done]
        touched.append(made.step())
        assert not {*touched[-1]} & {*done}
        if len(touched) == 3:
            made.abort(gone)
    assert any(stops in each for each in touched) and stops.output("").finish_reason == "stop"


@pytest.mark.parametrize("options", [{}, {"speculative_algorithm": "ngram"}])
def test_an_ended_request_is_freed_without_the_garbage_collector(options):
    made = engine(**options)
    gc.disable()
    try:
        ended = weakref.ref(made.add([*OTHER, *OTHER], PARAMS).request)
        finished(made)
        finished(made, made.add(PROMPT, PARAMS))  # now the last step is this request's
        assert ended() is None
    finally:
        gc.enable()


# -- steps that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["run", "sample", "settle", "write"])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_failed_step_changes_no_answer_and_leaks_no_page(monkeypatch, where, at, overlap):
    made = engine(overlap=overlap, chunked_prefill_size=9)
    jobs = [made.add(PROMPT, SCORED), made.add(PROMPT[:13], STOPPED), made.add(OTHER, PENALISED)]
    owner, name = {
        "run": (made.runner, "run"),
        "sample": (engine_module.sampler, "sample"),
        "settle": (made.scheduler, "settle"),
        "write": (engine_module.StepResult, "write"),
    }[where]
    inner, calls = getattr(owner, name), []

    def failing(*args):
        calls.append(args)
        if len(calls) == at:
            raise MemoryError("on purpose")
        return inner(*args)

    monkeypatch.setattr(owner, name, failing)
    failed = 0
    while made.busy:
        try:
            made.step()
        except MemoryError:
            failed += 1
            made.check()
    want = [lone(SCORED)[1], lone(STOPPED, PROMPT[:13])[1], lone(PENALISED, OTHER)[1]]
    monkeypatch.undo()
    assert failed == 1
    assert [interrupt.bits(job.output("")) for job in jobs] == want
    assert interrupt.check_idle(made) == []


# -- tokens already generated ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [PARAMS, PENALISED, SCORED, STOPPED, replace(STOPPED, logprobs=None, n=3)],
    ids=["sampled", "penalised", "scored", "stopped", "three"],
)
def test_a_continued_request_has_the_bits_of_an_uninterrupted_one(params):
    done, want = lone(params)
    tokens = [draft.token_ids for draft in done.completions]
    for overlap, kept in ((False, 1), (False, 4), (True, 4), (True, 99)):
        made = engine(overlap=overlap)
        job = made.add(PROMPT, params, generated=[ids[:kept] for ids in tokens])
        assert finished(made, job) == [want]
        assert interrupt.check_idle(made) == []


def test_a_source_is_encoded_again_for_a_continued_request():
    done, want = lone(PARAMS, tiny=BART)
    made = engine(BART)
    job = made.add(PROMPT, PARAMS, generated=[done.completions[0].token_ids[:3]])
    assert finished(made, job) == [want]


def test_tokens_that_cannot_have_been_generated_are_refused():
    made = engine()
    end = lone(STOPPED)[0].completions[0].token_ids
    for generated, params, match in (
        ([[1], [2]], PARAMS, r"every completion or for none; got \[1, 1\] for n=1"),
        ([[1], []], SCORED, r"every completion or for none; got \[1, 0\] for n=2"),
        ([[61]], PARAMS, "from 0 to 60; got 61"),
        (None, PARAMS, "a list of ids per completion; got None"),
        ([5], PARAMS, "a list of ids per completion; got 5"),
        (["ab"], PARAMS, "a list of ids per completion; got 'ab'"),
        ([[5] * 11], PARAMS, "past their completion's end; got 11, and 10 count"),
        ([[*end, 5]], STOPPED, "past their completion's end"),
        ([[5]], replace(PARAMS, seed=None), "continues generated tokens names its seed; got None"),
    ):
        with pytest.raises(RuleError, match=match):
            made.add(PROMPT, params, generated=generated)
    assert not made.busy and made.scheduler.counters["recovered"] == 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_finished_answer_that_is_resumed_keeps_the_scores_of_its_prompt(n):
    """The completion used to end before its prompt was computed: its scores were NaN."""
    made = engine()
    params = replace(PARAMS, prompt_logprobs=True, logprobs=None, n=n, ignore_eos=True)
    job = made.add(PROMPT, params)
    finished(made, job)
    whole = job.output("")
    known = [c.token_ids for c in whole.completions]
    if n == 2:  # the second goes on
        known[1] = known[1][:3]
    job = made.add(PROMPT, params, generated=known)
    finished(made, job)
    again = job.output("")
    assert again.prompt_logprobs.tobytes() == whole.prompt_logprobs.tobytes()
    assert np.isfinite(again.prompt_logprobs[1:]).all()
    assert [c.token_ids for c in again.completions] == [c.token_ids for c in whole.completions]


@pytest.mark.parametrize("flag", ["embed", "scores_only"])
def test_flags_of_a_request_are_bools(flag):
    with pytest.raises(RuleError, match=f"{flag} is True or False; got"):
        engine().add(PROMPT, **{flag: np.array([1, 2])})


def test_a_request_is_known_by_its_id():
    made = engine()
    job = made.add(PROMPT, PARAMS, request_id="mine")
    assert made.generations["mine"] is job
    with pytest.raises(RuleError, match="have different ids; got a second 'mine'"):
        made.add(OTHER, PARAMS, request_id="mine")
    with pytest.raises(RuleError, match="a request_id is a string; got 7"):
        made.add(OTHER, PARAMS, request_id=7)
    made.abort(job)
    again = made.add(PROMPT, PARAMS, request_id="mine")
    assert finished(made, again) == [lone(PARAMS)[1]]


def test_a_request_without_an_id_gets_an_unused_one():
    """Also where a caller continues with an id that an earlier engine gave."""
    first = engine().add(PROMPT, PARAMS).request.spec.request_id
    made = engine()
    made.add(PROMPT, PARAMS, request_id=first)
    made.add(OTHER, PARAMS)
    made.add_items(PROMPT, [[5]])
    assert len(made.generations) == 3 and first in made.generations


# -- publishing ------------------------------------------------------------------------------------


def test_text_is_detokenised_without_a_lock_on_the_engine(monkeypatch):
    made, inner, seen = engine(), CompletionState.publish, []

    def publish(self):
        if len(self.pieces) < len(self.token_ids):
            seen.append(list(made._turns))
        inner(self)

    monkeypatch.setattr(CompletionState, "publish", publish)
    job, text = made.add(PROMPT, PARAMS), ""
    while made.busy:
        made.step()
        chunks, _ = made.new_chunks(job)
        text += "".join(chunk.text for chunk in chunks)
    assert len(seen) == PARAMS.max_tokens and not any(seen)
    monkeypatch.undo()
    assert interrupt.bits(job.output("")) == lone(PARAMS)[1] and job.output("").text == text


@pytest.mark.parametrize("overlap", [False, True])
def test_unread_text_is_detokenised_while_a_device_computes_or_not_at_all(overlap):
    """On 16 cores, a step of 64 requests spent a tenth of its time on text that had not been asked
    for yet."""
    made = engine(overlap=overlap)
    job = made.add(PROMPT, PARAMS)
    while made.busy:
        made.step()
    (completion,) = job.completions
    assert bool(completion.pieces) == overlap
    assert interrupt.bits(job.output("")) == lone(PARAMS)[1] and completion.pieces


@pytest.mark.parametrize("before", [0, 4])
def test_detokenisation_that_was_interrupted_starts_again(before):
    def struck():
        yield from OTHER[:2]
        raise KeyboardInterrupt

    tokenizer, found = engine().tokenizer, []
    held_back = tokenizer.decode(OTHER[:2]) + "."  # a stop string that may still come
    params = replace(PARAMS, stop=(held_back,))
    for interrupted in (False, True):
        completion = CompletionState(params, PROMPT, (tokenizer, ()))
        completion.accept(tuple(PROMPT[:before]))
        completion.token_ids, completion.pieces = PROMPT[:before], completion.ahead
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                completion.accept(struck())
        completion.accept(tuple(OTHER))
        found.append(completion.ahead)
    assert found[0] == found[1] and "".join(found[0])


def test_a_finished_answer_has_its_text_even_before_it_is_published(monkeypatch):
    """Another thread may read it between settling and publishing."""
    made, want = engine(), lone(PARAMS)[1]
    monkeypatch.setattr(made, "_publish", lambda touched: touched)
    job = made.add(PROMPT, PARAMS)
    while made.busy:
        made.step()
    assert job.done and interrupt.bits(job.output("")) == want


@pytest.mark.parametrize("read", ["output", "news"])
def test_a_reader_that_sees_the_end_of_an_answer_sees_all_of_its_text(monkeypatch, read):
    """The last steps run while another thread reads the answer."""
    made, (_, want) = engine(), lone(PARAMS)
    job = made.add(PROMPT, PARAMS)
    made.step()
    publish = job.publish

    def slow() -> None:
        publish()
        while made.busy:
            made.step()

    monkeypatch.setattr(job, "publish", slow)
    if read == "output":
        assert job.output("").completions[0].finish_reason == "abort", "it had not ended"
    else:
        told = [*job.new_chunks(), *job.new_chunks()]
        assert "".join(chunk.text for chunk in told) == "".join(job.completions[0].pieces)
        assert [chunk.finish_reason for chunk in told] == [None, "length"]
    assert interrupt.bits(job.output("")) == want


def test_garbage_collection_is_enabled_again_after_an_interrupt_and_a_fork():
    GC_PAUSES.append(True)
    gc.disable()  # disabled by a thread that no longer exists
    try:
        context = multiprocessing.get_context("fork")
        with context.Pool(1) as pool:
            assert pool.apply(gc.isenabled)
        assert not gc.isenabled()
        with pause_gc():
            assert not gc.isenabled()
        assert gc.isenabled() and not GC_PAUSES
    finally:
        gc.enable()


def test_garbage_collection_is_enabled_again_after_many_pauses_of_two_threads():
    def turns() -> None:
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            with pause_gc():
                pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        pair = [threading.Thread(target=turns) for _ in range(2)]
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()
        assert gc.isenabled()
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
        GC_PAUSES.clear()


def test_garbage_collection_is_enabled_again_whichever_thread_leaves_first(monkeypatch):
    disable, there, left = gc.disable, threading.Event(), threading.Event()

    def late() -> None:
        """The second thread has found collection enabled, and disables it only after the first has
        left."""
        there.set()
        left.wait(5)
        disable()

    def second() -> None:
        with pause_gc():
            there.set()

    with pause_gc():
        monkeypatch.setattr(gc, "disable", late)
        thread = threading.Thread(target=second)
        thread.start()
        there.wait(5)
    left.set()
    thread.join()
    looks = gc.isenabled()
    gc.enable()
    assert looks


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_collection_is_paused_until_a_step_is_launched_or_has_failed(collects, monkeypatch):
    """It waits while the device has nothing to do; where the caller has disabled collection, it
    stays so."""
    monkeypatch.setattr(gc, "isenabled", lambda: collects)
    calls, made = list[str](), engine()
    monkeypatch.setattr(gc, "disable", lambda: calls.append("off"))
    monkeypatch.setattr(gc, "enable", lambda: calls.append("on"))
    launch, fails = made._launch, [True]

    def watched(step):
        calls.append("launch")
        if fails.pop():
            raise KeyboardInterrupt
        return launch(step)

    monkeypatch.setattr(made, "_launch", watched)
    made.add(PROMPT, PARAMS)
    with suppress(KeyboardInterrupt):
        made.step()
    fails.append(False)
    made.step()
    assert calls == [*["off"] * collects, "launch", *["on"] * collects] * 2
