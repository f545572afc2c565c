"""Interrupts, threads, and streams that are read in any order: nothing is lost, no page leaks,
every answer has its bits."""

from __future__ import annotations

import gc
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep.kernels.cpu import threads
from lockstep.lab import interrupt
from lockstep.lab.tiny import BART, LLAMA, QWEN3
from lockstep.llm.api import LLM
from lockstep.llm.calls import Caller, Turn
from lockstep.llm.engine import Engine
from lockstep.llm.generation import CompletionState
from lockstep.run.kind import GENERATE
from lockstep.sample.params import SamplingParams
from lockstep.text import Stream
from lockstep.types import RuleError

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # an interrupt raised in a finaliser is swallowed

PARAMS = SamplingParams(max_tokens=10, temperature=0.8, seed=3, logprobs=1)
PROMPT = list(range(3, 25))
OTHER = list(range(9, 21))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llm(tiny=QWEN3, **options) -> LLM:
    return LLM.of(interrupt.engine(tiny, **options))


def alone(prompt, params=PARAMS, tiny=QWEN3):
    return llm(tiny, disable_radix_cache=True, max_total_tokens=2048).generate([prompt], params)[0]


def joined(chunks):
    return (
        "".join(c.text for c in chunks),
        sum((c.token_ids for c in chunks), ()),
        chunks[-1].finish_reason,
    )


def whole(output):
    return output.text, output.token_ids, output.finish_reason


# -- interrupts ------------------------------------------------------------------------------------


def test_a_hundred_interrupts_break_no_engine():
    subjects = {tiny: interrupt.Subject(tiny) for tiny in interrupt.MODELS}
    trials = list(interrupt.run(subjects, 100, 10_000))
    assert not [t for t in trials if t.faults]
    assert sum(len(t.where) for t in trials) >= 100
    assert {t.model for t in trials if t.where} == {"llama", "qwen3", "bart"}
    assert {t.way for t in trials if t.where} == {"timer", "again", "thread"}
    counters = [each.llm.engine.scheduler.counters for each in subjects.values()]
    assert sum(each["recovered"] for each in counters) > 20


def swept(tiny, second, part):
    trials = list(interrupt.sweep(tiny, opcodes=False, second=second, seed=1, part=part))
    assert not [t for t in trials if t.faults]
    return trials


def test_an_interrupt_at_any_line_of_a_call_breaks_nothing():
    trials = swept(QWEN3, False, (0, 4))
    struck = {where for t in trials for where in t.where}
    assert sum(len(t.where) for t in trials) > 120
    rooms = {where.partition(".")[0] for where in struck}
    assert {
        "llm/engine",
        "llm/generation",
        "sched/scheduler",
        "kv/tables",
        "kv/prefix",
        "run/runner",
    } <= rooms


def test_an_interrupt_at_any_line_of_the_recovery_breaks_nothing():
    trials = swept(LLAMA, True, (0, 1))
    assert sum(len(t.where) == 2 for t in trials) > 100
    assert any("llm/engine._recover" in t.where for t in trials)


def forget(self):
    self._settled, self._changing = None, False


def unsynced(self):
    """Returns the stream as an interrupt left it, even if it is not in step with the text."""
    self._stream = self._stream or Stream(self.tokenizer, self.params.stop, self.prompt_ids)
    return self._stream


@pytest.mark.parametrize(
    ("of", "name", "wrong"),
    [
        (Engine, "_recover", forget),
        (Engine, "_abandoned", lambda self: []),
        (CompletionState, "_synced", unsynced),
    ],
    ids=["recover", "abandoned", "synced"],
)
def test_the_lab_notices_an_engine_that_does_not_recover(monkeypatch, of, name, wrong):
    monkeypatch.setattr(of, name, wrong)
    assert any(
        t.faults for t in interrupt.sweep(QWEN3, opcodes=False, second=False, seed=1, part=(0, 5))
    )


def test_a_kept_traceback_keeps_no_request():
    """A notebook keeps the last traceback, and with it all local variables of the call that was
    stopped."""
    model = llm()
    kept = []

    def stop():
        raise KeyboardInterrupt

    try:
        model.generate([OTHER, PROMPT], [replace(PARAMS, max_tokens=1), PARAMS], on_done=stop)
    except KeyboardInterrupt as error:
        kept.append(error)
    assert not model.engine.busy
    assert interrupt.check_idle(model.engine) == []
    assert kept


def test_a_request_of_a_call_interrupted_in_its_finally_is_removed_by_the_next_call(monkeypatch):
    """The interrupt is raised in the call's own `finally`, and the traceback is kept."""
    model = llm()
    kept = []

    def close(self):
        raise KeyboardInterrupt

    def stop():
        monkeypatch.setattr(Caller, "close", close)
        raise ValueError

    try:
        model.generate([OTHER, PROMPT], [replace(PARAMS, max_tokens=1), PARAMS], on_done=stop)
    except KeyboardInterrupt as error:
        kept.append(error)
    monkeypatch.undo()
    assert len(model.engine.generations) == 1
    assert whole(model.generate([PROMPT], PARAMS)[0]) == whole(alone(PROMPT))
    assert interrupt.check_idle(model.engine) == []
    assert kept


class Failing:
    """A generating model that raises at its n-th step."""

    def __init__(self, at):
        self.at, self.steps = at, 0

    def wrap(self, kind):
        def forward(*args):
            self.steps += 1
            if self.steps == self.at:
                raise RuntimeError("no memory")
            return kind.forward(*args)

        return replace(kind, forward=forward)


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("tiny", [QWEN3, BART], ids=lambda tiny: tiny.name)
def test_a_failed_step_repeats_and_loses_no_score(tiny, at):
    """A step fails half way through the scores of a prompt and of items: no score is repeated or
    missing, and every request continues."""
    model = llm(tiny, chunked_prefill_size=24 if tiny is BART else 5, graphs=False)
    calm = llm(tiny, disable_radix_cache=True, max_total_tokens=2048).engine
    params = replace(PARAMS, n=2, prompt_logprobs=None if tiny is BART else 1)

    def added(engine):
        return engine.add(PROMPT, params), engine.add_items(
            OTHER, [[5], [6, 7, 8], [9, 5, 6, 7, 8]]
        )

    want = added(calm)
    while calm.busy:
        calm.step()
    engine = model.engine
    engine.kinds[GENERATE] = Failing(at).wrap(engine.kinds[GENERATE])
    jobs, failed = added(engine), 0
    while engine.busy:
        try:
            engine.step()
        except RuntimeError:
            failed += 1
    assert failed == 1
    assert engine.scheduler.counters["recovered"] == 1
    assert [interrupt.bits(job.output("")) for job in jobs] == [
        interrupt.bits(job.output("")) for job in want
    ]
    assert interrupt.check_idle(engine) == []


def test_a_refused_call_evicts_nothing_from_the_prefix_cache():
    model = llm(max_total_tokens=512)
    model.generate([PROMPT], PARAMS)
    with pytest.raises(RuleError):
        model.generate([PROMPT, []], PARAMS)
    with pytest.raises(RuleError):
        model.generate([PROMPT], replace(PARAMS, max_tokens=150))
    (again,) = model.generate([PROMPT], PARAMS)
    assert again.cached_tokens == 20
    assert model.engine.scheduler.counters["recovered"] == 0


# -- streams ---------------------------------------------------------------------------------------


def test_a_call_inside_the_loop_of_a_stream_takes_no_tokens_from_it():
    """`generate` used to compute the stream's tokens too, and the stream ended without them."""
    model, chunks = llm(), []
    for chunk in model.stream(PROMPT, PARAMS):
        chunks.append(chunk)
        if len(chunks) == 2:
            (inner,) = model.generate([OTHER], replace(PARAMS, max_tokens=30))
    assert joined(chunks) == whole(alone(PROMPT))
    assert whole(inner) == whole(alone(OTHER, replace(PARAMS, max_tokens=30)))
    assert interrupt.check_idle(model.engine) == []


@pytest.mark.parametrize("second", [3, 10, 25])
def test_streams_read_side_by_side_yield_what_each_yields_alone(second):
    model, params = llm(), replace(PARAMS, max_tokens=second, n=2)
    one, two = model.stream(PROMPT, PARAMS), model.stream(OTHER, params)
    pairs = list(zip_longest(one, two))
    ours, theirs = (
        [chunk for chunk in side if chunk is not None] for side in zip(*pairs, strict=True)
    )
    assert joined(ours) == whole(alone(PROMPT))
    assert [joined([c for c in theirs if c.index == i])[:2] for i in range(2)] == [
        (c.text, c.token_ids) for c in alone(OTHER, params).completions
    ]
    assert interrupt.check_idle(model.engine) == []


def test_streams_read_alternately_lose_nothing():
    model = llm()
    streams = {
        i: model.stream(prompt, PARAMS) for i, prompt in enumerate((PROMPT, OTHER, PROMPT[:7]))
    }
    chunks: dict[int, list] = {i: [] for i in streams}
    open_streams = set(streams)
    while open_streams:
        for i in sorted(open_streams):
            chunk = next(streams[i], None)
            if chunk is None:
                open_streams.discard(i)
            else:
                chunks[i].append(chunk)
    assert [joined(chunks[i]) for i in range(3)] == [
        whole(alone(p)) for p in (PROMPT, OTHER, PROMPT[:7])
    ]
    assert interrupt.check_idle(model.engine) == []


@pytest.mark.parametrize("how", ["break", "close", "throw", "forget"])
def test_an_abandoned_stream_removes_its_request_and_no_other(how):
    model = llm()
    other = model.stream(OTHER, PARAMS)
    chunks = [next(other)]
    left = model.stream(PROMPT, PARAMS)
    next(left)
    if how == "close":
        left.close()
    elif how == "throw":
        with pytest.raises(ValueError, match="mine"):
            left.throw(ValueError("mine"))
        assert list(left) == []
    elif how == "forget":
        del left
    else:
        for _ in left:
            break
        del left
    gc.collect()
    chunks += other
    assert joined(chunks) == whole(alone(OTHER))
    assert interrupt.check_idle(model.engine) == []


def test_a_closed_stream_computes_no_more_rows_while_another_continues():
    model = llm()
    other, left = model.stream(OTHER, PARAMS), model.stream(PROMPT, PARAMS)
    chunks = [next(other)]
    next(left)
    left.close()
    chunks.append(next(other))
    assert len(model.engine.generations) == len(model.engine.scheduler.running) == 1
    assert joined([*chunks, *other]) == whole(alone(OTHER))


def test_a_stream_adds_its_request_only_when_it_is_read():
    model = llm()
    stream = model.stream(PROMPT, PARAMS)
    assert not model.engine.busy
    assert joined(list(stream)) == whole(alone(PROMPT))


# -- threads ---------------------------------------------------------------------------------------


def test_threads_get_the_answers_of_lone_runs():
    model = llm()
    prompts = [PROMPT, OTHER, PROMPT[:9], OTHER[:5]]
    answers: dict[int, list] = {i: [] for i in range(4)}

    def work(i):
        for _ in range(3):
            if i % 2:
                answers[i].append(joined(list(model.stream(prompts[i], PARAMS))))
            else:
                answers[i].append(whole(model.generate([prompts[i]], PARAMS)[0]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, prompt in enumerate(prompts):
        assert answers[i] == [whole(alone(prompt))] * 3
    assert interrupt.check_idle(model.engine) == []


def test_a_thread_that_ended_inside_its_turn_blocks_no_other_thread():
    queue: list[Turn] = []

    def enter():
        Turn(queue).__enter__()  # and no exit: as if an interrupt had struck in between

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(queue) == 1
    enter()
    assert len(queue) == 1, "the one in front was gone"
    with Turn(queue):
        assert len(queue) == 1
    assert queue == []


def test_turns_are_taken_in_order_and_one_at_a_time():
    queue: list[Turn] = []
    inside, most, order = 0, 0, []

    def work(i):
        nonlocal inside, most
        for _ in range(20):
            with Turn(queue):
                inside += 1
                most = max(most, inside)
                order.append(i)
                time.sleep(1e-4)
                inside -= 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, len(order), queue) == (1, 60, [])
    longest = max(np.diff([-1, *np.flatnonzero(np.diff(order)), 59]))
    assert longest < 20, "nobody has all turns at once while others wait"


def test_a_call_from_inside_a_call_of_the_same_thread_is_refused_and_breaks_nothing(monkeypatch):
    model = llm()
    inner = model.engine.runner.run

    def run(*args):
        monkeypatch.undo()
        model.generate([OTHER], PARAMS)
        return inner(*args)

    monkeypatch.setattr(model.engine.runner, "run", run)
    with pytest.raises(
        RuleError, match="one call on an engine at a time; got a second one from inside"
    ):
        model.generate([PROMPT], PARAMS)
    assert whole(model.generate([PROMPT], PARAMS)[0]) == whole(alone(PROMPT))
    assert interrupt.check_idle(model.engine) == []


# -- the floor -------------------------------------------------------------------------------------


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Makes one processor available, which is not enough for two threads."""
    monkeypatch.setattr(threads, "CORES", 1)


def test_an_engine_that_leaves_cores_for_another_takes_no_ticket(monkeypatch):
    """Two engines with a thread each used to take turns on two processors."""
    monkeypatch.setattr(threads, "CORES", 2)
    with threads.limited(1), threads.engine_turn():
        assert threads.TICKETS == []
    with threads.limited(2), threads.engine_turn():
        assert len(threads.TICKETS) == 1
    assert threads.TICKETS == []


def test_engine_turns_are_taken_in_order_and_one_at_a_time(monkeypatch, one_at_a_time):
    monkeypatch.setattr(threads, "PATIENCE_S", 60)
    inside, most, order = 0, 0, []

    def work(i):
        nonlocal inside, most
        for _ in range(20):
            with threads.engine_turn():
                inside += 1
                most = max(most, inside)
                order.append(i)
                time.sleep(1e-4)
                inside -= 1

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (most, len(order), threads.TICKETS) == (1, 60, [])
    longest = max(np.diff([-1, *np.flatnonzero(np.diff(order)), 59]))
    assert longest < 20, "nobody has it all the time while others wait"


def test_an_engine_turn_that_was_lost_or_is_held_for_long_costs_one_wait(one_at_a_time):
    kept = [threads.engine_turn(), threads.engine_turn()]
    thread = threading.Thread(target=kept[0].__enter__)  # never left
    thread.start()
    thread.join()
    (lost,) = threads.TICKETS
    with threads.engine_turn():
        assert lost not in threads.TICKETS and len(threads.TICKETS) == 1
        with ThreadPoolExecutor(1) as pool:
            begin = time.perf_counter()
            pool.submit(kept[1].__enter__).result()  # it is not handed over
            assert time.perf_counter() - begin >= threads.PATIENCE_S
            (other,) = threads.TICKETS
    assert threads.TICKETS == [other], "it is not ours to leave"
    threads.TICKETS.clear()


def test_an_engine_that_is_called_inside_a_step_of_another_waits_once(one_at_a_time):
    with threads.engine_turn():
        (outer,) = threads.TICKETS
        with threads.engine_turn():
            assert len(threads.TICKETS) == 1 and outer not in threads.TICKETS
        assert threads.TICKETS == []
    assert threads.TICKETS == []


def test_an_interrupt_while_waiting_for_an_engine_turn_leaves_no_ticket(monkeypatch, one_at_a_time):
    monkeypatch.setattr(threads, "PATIENCE_S", 60)
    main, theirs = threading.main_thread().ident, threading.Lock()

    def strike():
        while len(threads.TICKETS) < 2:
            time.sleep(1e-3)
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threads.TICKETS.append(theirs)
    striker = threading.Thread(target=strike)
    striker.start()
    with pytest.raises(KeyboardInterrupt), threads.engine_turn():
        raise AssertionError("somebody else has it")
    striker.join()
    signal.signal(signal.SIGINT, before)
    assert threads.TICKETS == [theirs]
    threads.TICKETS.clear()


@pytest.mark.parametrize("turn_ns", [0, 10**12])
def test_a_call_that_releases_the_gil_keeps_the_engine_turn(monkeypatch, one_at_a_time, turn_ns):
    monkeypatch.setattr(threads, "TURN_NS", turn_ns)
    seen = []
    for call in ("call", "released"):
        monkeypatch.setattr(threads.compiled(), call, lambda *_: seen.append(list(threads.TICKETS)))
    with threads.engine_turn():
        before = list(threads.TICKETS)
        threads.Call(SimpleNamespace(address=0), (), 1, 1, 10).run()
        assert seen == [threads.TICKETS] == [before] and len(before) == 1
    assert threads.TICKETS == []


# -- priorities ------------------------------------------------------------------------------------


def test_a_higher_priority_is_answered_first_with_the_same_bits():
    model, ended = llm(max_running_requests=1), []
    engine = model.engine
    jobs = [
        engine.add(prompt, PARAMS, priority=p)
        for prompt, p in ((PROMPT, 0), (OTHER, 1), (PROMPT[:9], 2))
    ]
    while engine.busy:
        engine.step()
        ended += [i for i, job in enumerate(jobs) if job.done and i not in ended]
    assert ended == [2, 1, 0]
    for job, prompt in zip(jobs, (PROMPT, OTHER, PROMPT[:9]), strict=True):
        assert whole(job.output("")) == whole(alone(prompt))
    one = model.generate([PROMPT, OTHER], PARAMS, priority=[0, 5])
    assert [whole(o) for o in one] == [
        whole(o) for o in model.generate([PROMPT, OTHER], PARAMS, priority=3)
    ]


def test_bad_priorities_and_tenants_are_reported_in_one_line():
    model = llm()
    with pytest.raises(
        RuleError, match="one priority for all prompts or one for each; got 1 for 2 prompts"
    ):
        model.generate([PROMPT, OTHER], PARAMS, priority=[1])
    with pytest.raises(RuleError, match=r"priority is a whole number from .*; got 1\.5"):
        model.generate([PROMPT], PARAMS, priority=1.5)
    with pytest.raises(RuleError, match="priority is a whole number"):
        model.engine.add(PROMPT, PARAMS, priority=None)
    with pytest.raises(RuleError, match="a tenant is a string; got 7"):
        model.engine.add(PROMPT, PARAMS, tenant=7)
    assert not model.engine.busy


def test_tenants_share_no_keys():
    engine = llm(max_total_tokens=512).engine
    hits = []
    for tenant in ("a", "a", "b", ""):
        job = engine.add(PROMPT, PARAMS, tenant=tenant)
        while engine.busy:
            engine.step()
        hits.append(job.output("").cached_tokens)
        assert whole(job.output("")) == whole(alone(PROMPT))
    assert hits == [0, 20, 0, 0]
