"""The tape: a launch is recorded once per bucket and replayed for every later step of that bucket,
with the bits of running it. A number that was frozen when recording goes stale, so such a bug
shows."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standalone import standalone

from lockstep.attention import cpu
from lockstep.config import EngineConfig
from lockstep.kernels.cpu import gemm, threads
from lockstep.kernels.cpu import rows as kernel_rows
from lockstep.kernels.cpu.ops import Ops, kv_write
from lockstep.kv import pool as kv_pool
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.lab import tiny
from lockstep.llm.engine import Engine
from lockstep.nn import decoder
from lockstep.ops import Activation, active_modes, mark_operations, operation
from lockstep.plan.bucket import RECORDED_ROWS, Buckets, pad
from lockstep.plan.build import RequestWork, build
from lockstep.run import runner as runner_module
from lockstep.run import tape as tape_module
from lockstep.run.kind import GENERATE, group_specs, kinds_of
from lockstep.run.runner import Runner, Share, StepDriver, without_moves
from lockstep.run.step import layout_of, lower
from lockstep.run.tape import Call as RecordedCall
from lockstep.run.tape import Tape
from lockstep.sample.params import SamplingParams
from lockstep.types import AttnSpec, GroupSpec, Layout, RuleError

SIZES = (1, 2, 4, 8, 16, 32, 64)
CANARY = -0x5A5A5A5A
DENSE = GroupSpec(Layout.DENSE, 4, 2, 16, 16, (AttnSpec(0.25),), page_size=4)
KINDS = [tiny.LLAMA, tiny.QWEN3, tiny.DEEPSEEK, tiny.GPT_OSS, tiny.GEMMA2, tiny.BART]


@cache
def parts(model: tiny.Tiny) -> Any:
    return tiny.parts(model, cpu.Backend())


# ---- what a tape records ----


def test_a_replay_repeats_operations_and_torch_calls_into_the_same_memory():
    x, out = torch.ones(4), torch.zeros(4)

    @operation
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() + 1)  # unseen by torch

    def launch() -> torch.Tensor:
        y = plus_one(x) * 2
        out.view(2, 2)[1] += y[:2]
        return y

    tape = Tape()
    tape.record(launch)
    assert tape.output.tolist() == [4.0] * 4
    x.copy_(torch.arange(4.0))
    memory = tape.output.data_ptr()
    again = tape.replay()
    assert again.tolist() == [2.0, 4.0, 6.0, 8.0] and again.data_ptr() == memory
    assert out.tolist() == [0.0, 0.0, 4.0 + 2.0, 4.0 + 4.0]
    assert tape.replays == 1


def test_a_launch_whose_shapes_depend_on_tensor_values_is_not_recorded():
    tape = Tape()
    with pytest.raises(RuleError, match=r"shapes of a recorded launch .* got aten.nonzero"):
        tape.record(lambda: torch.nonzero(torch.ones(3)))
    with pytest.raises(RuleError, match=r"got aten._local_scalar_dense"):
        tape.record(lambda: torch.ones(1).item())


def test_an_operation_that_gives_another_shape_on_replay_is_refused_with_both_shapes():
    lengths = iter((3, 5))
    tape = Tape()
    tape.record(lambda: operation(lambda: torch.zeros(next(lengths)))())
    with pytest.raises(RuleError, match=r"float32 of \[3\], then torch.float32 of \[5\]"):
        tape.replay()


# ---- kernels ----


def product(rows: int = 9, columns: int = 70, out: int = 500, seed: int = 0) -> Any:
    """Returns the input of two kernels, and a launch that runs them."""
    made = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.randn(rows, columns, generator=made),
        gemm.pack(torch.randn(out, columns, generator=made), None),
    )
    linear, act = operation(gemm.linear), operation(kernel_rows.act_and_mul)
    return x, lambda: act(linear(x, weight), Activation.SILU)


def test_consecutive_kernels_are_replayed_as_one_call_into_memory_that_stays_allocated():
    x, launch = product()
    tape = Tape()
    tape.record(launch)
    want = launch()
    assert [type(each) for each in tape._calls] == [threads.Script]
    assert tape._calls[0].works == [gemm.work(), kernel_rows.work()]
    assert torch.equal(tape.output, want)
    x *= -0.5
    others = [torch.full_like(want, torch.nan) for _ in range(50)]  # would take freed memory
    assert torch.equal(tape.replay(), launch())
    assert all(torch.isnan(other).all() for other in others)


def test_a_call_between_kernels_that_is_no_kernel_is_replayed_in_its_place():
    x, launch = product()

    @operation
    def halved(y: torch.Tensor) -> torch.Tensor:
        """A kernel, then numpy, which the recorder cannot see: this operation is not declared
        transparent."""
        return torch.from_numpy(kernel_rows.sigmoid(y).numpy() / 2)

    def longer() -> torch.Tensor:
        y = halved(launch()) + 1.0
        return kernel_rows.sigmoid(y)

    tape = Tape()
    tape.record(longer)
    kinds = [type(each) for each in tape._calls]
    assert kinds == [threads.Script, RecordedCall, RecordedCall, threads.Script]
    x += 3.0
    assert torch.equal(tape.replay(), longer())


def test_tapes_share_working_memory_but_not_the_memory_of_their_outputs():
    room = threads.TapeMemory()
    (x, first), (_, second) = product(seed=1), product(seed=2)
    one, two = Tape(room), Tape(room)
    one.record(first)
    places = len(room.places)
    two.record(second)
    assert len(room.places) == places + 1  # they share products' memory, not results'
    kept = one.output.clone()
    assert torch.equal(two.replay(), second()) and torch.equal(one.output, kept)
    x *= 2
    assert torch.equal(one.replay(), first())


def test_a_replay_with_a_slot_outside_the_pool_is_refused_and_writes_nothing():
    slots, storage = torch.tensor([2, 1], dtype=torch.int32), torch.zeros(4, 1, 16)
    tape = Tape()
    write = operation(kv_write)
    tape.record(lambda: write(storage, slots, torch.ones(2, 1, 16), 1.0))
    assert storage.sum() == 32
    slots[1] = 4
    storage.zero_()
    with pytest.raises(RuleError, match="every row index that a replayed launch reads or writes"):
        tape.replay()
    assert storage.sum() == 0
    with pytest.raises(IndexError, match="slot 7 is out of bounds for axis 0 with size 4"):
        kernel_rows.take(storage[:, 0], torch.tensor([0, 7], dtype=torch.int32))


def test_a_forked_process_replays_a_launch_recorded_with_helper_threads():
    with threads.limited(2):
        _, launch = product(200)
        tape = Tape()
        tape.record(launch)
        want = launch()
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(tape.replay(), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_recording_loads_no_compiler_of_torch():
    assert Tape.__torch_dispatch__.__code__.co_filename == tape_module.__file__


def test_an_interrupt_while_recording_leaves_no_recorder_active():
    def launch() -> None:
        raise KeyboardInterrupt

    for entered in (Tape.__enter__, interrupted):
        tape = Tape()
        tape.__class__ = type("Broken", (Tape,), {"__enter__": entered})
        with pytest.raises(KeyboardInterrupt):
            tape.record(launch)
        assert active_modes() == 0 and threads.OWN.tape is None


def test_an_interrupt_leaves_no_address_of_freed_memory():
    code, strikes = threads.memory.__code__, 0

    def strike(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = frame.f_code is code
        if event == "opcode" and frame.f_code is code:
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return strike

    while strikes < 500:
        left, traced, strikes = strikes, sys.gettrace(), strikes + 1
        room = threads.TapeMemory()
        threads.OWN.tape = Tape(room)
        try:
            sys.settrace(strike)
            threads.memory(1 << 12, 4)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(traced)
            threads.OWN.tape = None
        memory, address = room.memory
        assert threads.address_of(memory) <= address < threads.address_of(memory) + 64
    assert 10 < strikes < 500
    room.empty((64,), np.float32)
    blocks = next(each for each in room.free.values() if each)
    lost = weakref.ref(blocks.pop()[0])
    assert lost() is not None and len(room.places) == 1


def interrupted(tape: Tape) -> None:
    """Raises right after the last statement of `Tape.__enter__`."""
    Tape.__enter__(tape)
    raise KeyboardInterrupt


# ---- engines ----


def answers(engine: Engine, arrivals: Sequence[tuple[int, int]]) -> list[Any]:
    """Returns tokens and log-probabilities of requests that arrive at the given steps with prompts
    of the given lengths. The batch grows, then shrinks as they end."""
    jobs, step = [], 0
    while len(jobs) < len(arrivals) or engine.busy:
        while len(jobs) < len(arrivals) and arrivals[len(jobs)][0] <= step:
            i, length = len(jobs), arrivals[len(jobs)][1]
            params = SamplingParams(
                max_tokens=6 + 9 * (i % 3),
                temperature=0.8 * (i % 2),
                seed=i,
                n=1 + 2 * (i % 4 == 3),
                logprobs=2,
                ignore_eos=True,
            )
            jobs.append(engine.add(tiny.words(length, i % 3), params))
        engine.step()
        step += 1
    outs = [job.output("") for job in jobs]
    return [
        (c.token_ids, np.asarray(c.logprobs, np.float32).tobytes())
        for out in outs
        for c in out.completions
    ]


# (step, prompt length): at a bucket, one below, one above; from 7 down to 1 decode together
ARRIVALS = [(0, 7), (0, 8), (1, 9), (2, 15), (2, 31), (5, 33), (9, 3)]


def engine(
    model: tiny.Tiny, backend: Any = None, late: bool | None = None, **options: Any
) -> Engine:
    given = {"context_length": tiny.CONTEXT, "page_size": 4, "chunked_prefill_size": 64}
    given |= {"max_total_tokens": 512, "max_running_requests": 8}
    made = parts(model) if backend is None else replace(parts(model), backend=backend)
    return Engine(EngineConfig.from_names(given | options), made, late)


PADDED = {"bucket_sizes": SIZES, "request_bucket_sizes": (4, 16), "emit_bucket_sizes": (8,)}


@pytest.mark.parametrize("model", KINDS, ids=lambda model: model.name)
def test_an_engine_that_replays_launches_has_the_bits_of_one_that_does_not(model):
    want = answers(engine(model), ARRIVALS)
    recorded = engine(model, graphs=True, **PADDED)
    assert answers(recorded, ARRIVALS) == want
    tapes = recorded.runner.tapes.values()
    assert sum(tape.replays for tape in tapes) > 15
    assert any(tape.replays > 3 for tape in tapes)


@pytest.mark.parametrize("model", KINDS, ids=lambda model: model.name)
@pytest.mark.parametrize("late", [False, True])
def test_decode_steps_are_replayed_by_default_with_the_bits_of_plain_launches(model, late):
    want = answers(engine(model, graphs=False), ARRIVALS)
    tight = {"chunked_prefill_size": 5, "max_total_tokens": 64}  # too tight for an encoder
    for options in ({}, tight)[: 1 + (model is not tiny.BART)]:
        usual = engine(model, late=late, **options)
        assert answers(usual, ARRIVALS) == want
        assert usual.runner.replays[GENERATE] > 3
        widths = {each.bucket.width for each in usual.runner.tapes}
        assert 1 in widths and max(widths) <= RECORDED_ROWS and 0 not in widths
        assert usual.scheduler.counters["preempted"] or not options


def test_a_replayed_decode_step_is_one_call_of_compiled_code():
    usual = engine(tiny.QWEN3)
    answers(usual, [(0, 3), (0, 3)])
    tapes = list(usual.runner.tapes.values())
    assert tapes and all(len(tape._calls) == 1 for tape in tapes)


def test_a_launch_is_replayed_only_with_the_thread_count_it_was_recorded_with():
    usual, seen = engine(tiny.LLAMA, page_size=64), []
    job = usual.add(tiny.words(5), SamplingParams(max_tokens=60, ignore_eos=True))
    for most in (1, 1, 1, 1, 1, 1, 2, 2, 2, 1):
        with threads.limited(most):
            usual.step()
        seen.append(usual.runner.replays.total())
    usual.abort(job)
    assert seen == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("model", [tiny.LLAMA, tiny.GPT_OSS], ids=lambda model: model.name)
def test_inference_mode_around_some_steps_and_not_around_others_changes_no_bit(model):
    options = {"kv_cache_dtype": "float16"}  # torch writes this cache dtype
    want = answers(engine(model, graphs=False, **options), ARRIVALS)
    usual = engine(model, **options)
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            assert answers(usual, ARRIVALS) == want
    assert len({signature.threads for signature in usual.runner.tapes}) == 2


def test_a_model_that_reads_tensor_values_runs_unrecorded_and_is_refused_if_graphs_are_required(
    monkeypatch,
):
    block = decoder.Block.__call__

    def halved(self: Any, *rows: Any) -> Any:
        hidden, residual = block(self, *rows)
        return hidden.index_put((hidden > 0.5,), hidden[hidden > 0.5] / 2), residual

    monkeypatch.setattr(decoder.Block, "__call__", halved)
    want = answers(engine(tiny.LLAMA, graphs=False), ARRIVALS)
    assert answers(engine(tiny.LLAMA), ARRIVALS) == want
    with pytest.raises(RuleError, match="which depends on values of tensors"):
        answers(engine(tiny.LLAMA, graphs=True), ARRIVALS)


def test_the_number_of_recorded_launches_is_limited(monkeypatch):
    monkeypatch.setattr(runner_module, "TAPES", 2)
    usual = engine(tiny.LLAMA)
    want = answers(engine(tiny.LLAMA, graphs=False), ARRIVALS)
    assert answers(usual, ARRIVALS) == want
    assert len(usual.runner.tapes) == 2


class FrozenLengths(cpu.Backend):
    """Takes the visible range of rows when the launch is bound, not when it runs."""

    def bind(self, spec: Any, bucket: Any, views: Any, variant: Any) -> Any:
        return super().bind(spec, bucket, replace(views, derived=copied(views.derived)), variant)


class FrozenPages(cpu.Backend):
    """Takes the page table when the launch is bound."""

    def bind(self, spec: Any, bucket: Any, views: Any, variant: Any) -> Any:
        return super().bind(spec, bucket, replace(views, page_ids=copied(views.page_ids)), variant)


class FrozenPads(cpu.Backend):
    """Leaves out the blocks of requests that are pads when the launch is bound."""

    def bind(self, spec: Any, bucket: Any, views: Any, variant: Any) -> Any:
        request, begin, end = views.derived[2 * bucket.tokens :].view(-1, 3).numpy().T
        page = views.page_ids.numpy()[views.page_indptr.numpy()[request]]
        real = int(((page > 0) & (end > begin)).sum())
        derived = views.derived[: 2 * bucket.tokens + 3 * real]
        return super().bind(spec, bucket, replace(views, derived=derived), variant)


def copied(array: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array.numpy().copy())


def unrecorded(backend: cpu.Backend) -> cpu.Backend:
    """Withdraws the statement that a launch depends only on its bucket and the image, so that every
    launch is bound again."""
    backend.caps = replace(cpu.CAPS, graphs=False)
    return backend


# a request that grows alone: a frozen length is too short but never beyond its pages
ALONE = [(0, 7)]
# more and more requests in one bucket
GROWING = [(0, 9), (3, 2), (5, 2)]


@pytest.mark.parametrize(
    ("frozen", "arrivals"), [(FrozenLengths, ALONE), (FrozenPages, ARRIVALS), (FrozenPads, GROWING)]
)
def test_a_number_copied_in_bind_is_right_in_its_step_and_stale_when_replayed(
    frozen, arrivals, monkeypatch
):
    monkeypatch.setattr(runner_module, "STEADY", {})
    want = answers(engine(tiny.LLAMA), arrivals)
    assert answers(engine(tiny.LLAMA, unrecorded(frozen()), **PADDED), arrivals) == want
    assert answers(engine(tiny.LLAMA, frozen(), **PADDED), arrivals) != want, "by default"
    recorded = engine(tiny.LLAMA, frozen(), graphs=True, **PADDED)
    assert answers(recorded, arrivals) != want


def test_a_write_slot_that_is_copied_at_the_launch_is_stale_when_replayed(monkeypatch):
    want = answers(engine(tiny.LLAMA), ARRIVALS)
    made = kv_pool.KvWriter.__init__

    def frozen(self: Any, pool: Any, views: Any) -> None:
        made(self, pool, replace(views, write_slots=copied(views.write_slots)))

    monkeypatch.setattr(kv_pool.KvWriter, "__init__", frozen)
    assert answers(engine(tiny.LLAMA, unrecorded(cpu.Backend()), **PADDED), ARRIVALS) == want
    recorded = engine(tiny.LLAMA, graphs=True, **PADDED)
    assert answers(recorded, ARRIVALS) != want


class Planned(cpu.Backend):
    """Keeps its lengths in a buffer of its own, as a library's planner does. With `moving`, every
    step gets a new buffer."""

    caps = replace(cpu.CAPS, planner_buffers=("kept",))

    def __init__(self, moving: bool) -> None:
        super().__init__()
        self.moving = moving
        self.buffers: dict[Any, torch.Tensor] = {}

    def lower(self, plan: Any, group: Any, views: Any) -> None:
        super().lower(plan, group, views)
        key = group.spec, len(views.derived)
        if key not in self.buffers or self.moving:
            self.buffers[key] = torch.empty(len(views.derived), dtype=torch.int32)
        self.buffers[key].copy_(torch.from_numpy(views.derived))
        views.derived[:] = 0

    def bind(self, spec: Any, bucket: Any, views: Any, variant: Any) -> Any:
        kept = self.buffers[spec, len(views.derived)]
        handle = super().bind(spec, bucket, replace(views, derived=kept), variant)
        object.__setattr__(handle, "kept", kept)
        return handle


@pytest.mark.parametrize("moving", [False, True])
def test_a_backend_may_keep_plan_buffers_and_a_moved_buffer_is_not_replayed_from(moving):
    want = answers(engine(tiny.LLAMA), ARRIVALS)
    assert answers(engine(tiny.LLAMA, Planned(moving), **PADDED), ARRIVALS) == want
    recorded = engine(tiny.LLAMA, Planned(moving), graphs=True, **PADDED)
    assert answers(recorded, ARRIVALS) == want
    assert any(tape.replays for tape in recorded.runner.tapes.values()) or moving


def test_a_backend_that_does_not_state_graphs_is_not_recorded():
    backend = cpu.Backend()
    backend.caps = replace(cpu.CAPS, graphs=False)
    with pytest.raises(RuleError, match="launches are recorded with a backend that states"):
        Runner([DENSE], [4], backend, Ops(), graphs=True)


def test_an_operations_table_whose_calls_a_tape_would_miss_is_refused():
    with pytest.raises(RuleError, match="every operation of a recorded launch is marked; got pack"):
        Runner([DENSE], [4], cpu.Backend(), Ops(), graphs=True)
    assert Runner([DENSE], [4], cpu.Backend(), mark_operations(Ops()), graphs=True).graphs


# ---- the arena ----


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.booleans(), st.integers(1, 4))
def test_arrays_a_backend_derives_have_the_stated_length_and_are_written_whole(lens, padded, heads):
    spec = replace(DENSE, heads=16 * heads, kv_heads=2 if heads < 4 else 1)
    pages = PagePool(128)
    tables = [PageTable(CacheGroups((spec,), (pages,))) for _ in lens]
    for table, n in zip(tables, lens, strict=True):
        table.reserve(n)
    works = [RequestWork(0, n, (t.pages(0),)) for t, n in zip(tables, lens, strict=True)]
    plan = build((spec,), works)
    if padded:
        plan = pad(plan, Buckets((1, 8, 64, 256)).fit(plan))
    layout = layout_of(plan.bucket, (spec,), cpu.Backend())
    image = np.full(layout.length, CANARY, np.int32)
    lower(plan, [1] * plan.real.tokens, cpu.Backend(), layout, image)
    for views in layout.views(image):
        assert all((np.asarray(array) != CANARY).all() for array in vars(views).values())
    rows, cut = plan.bucket.tokens, layout.views(image)[0].derived[2 * plan.bucket.tokens :]
    covered = [r for _, begin, end in cut.reshape(-1, 3).tolist() for r in range(begin, end)]
    assert sorted(covered) == list(range(rows))


def test_lowering_touches_no_cache_and_the_launch_moves_the_keys():
    model = parts(tiny.LLAMA)
    kinds = kinds_of(model.model, page_size=8)
    pages = [0 if s.layout is Layout.FRESH else 32 for s in group_specs(kinds.values())]
    driver = StepDriver(kinds, pages, cpu.Backend())
    kind, first = kinds[GENERATE], driver.request()
    driver.step(kind, [Share(first, tiny.words(12))])
    second = first.fork(12)  # half a page must be moved
    pools = [driver.runner.pools[g] for g in kind.groups]
    after = [s.view(torch.int32) for pool in pools for layer in pool.storages for s in layer]
    before = [s.clone() for s in after]
    plan = driver.plan(kind, [Share(second, [5], cached_len=12)])
    assert plan.bucket.moves == (4,)
    step = standalone(plan, cpu.Backend(), pools, kind.layer_map, [5])
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    step.relocate()
    assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_keys_are_moved_before_a_launch_that_may_run_twice():
    caches, pools = [PagePool(8), PagePool(8)], [kv_pool.Pool(DENSE, 8, Ops()) for _ in range(2)]
    specs = (DENSE, DENSE)
    table = PageTable(CacheGroups(specs, caches))
    table.reserve(6)
    fork = table.fork(6)  # half a page of each group is to be moved
    for pool in pools:
        for layer in pool.storages:
            for storage in layer:
                storage.copy_(torch.randn(storage.shape))
    plan = build(specs, [RequestWork(6, 1, (fork.pages(0), fork.pages(1)))])
    assert plan.bucket.moves == (2, 2)
    done = without_moves(plan, pools, torch.device("cpu"))
    assert done.bucket.moves == (0, 0) and not any(len(group.moves) for group in done.groups)
    for pool, group in zip(pools, plan.groups, strict=True):
        begins, ends = torch.tensor(group.moves).T
        assert torch.equal(pool.keys(0).k[begins], pool.keys(0).k[ends])


def test_rows_requests_and_emits_are_each_rounded_up_to_their_own_grid():
    pages = PagePool(64)
    tables = [PageTable(CacheGroups((DENSE,), (pages,))) for _ in range(3)]
    for table in tables:
        table.reserve(9)
    works = [
        RequestWork(0, n, (t.pages(0),), (0,) * 3) for n, t in zip((9, 2, 3), tables, strict=True)
    ]
    plan = build((DENSE,), works)
    bucket = Buckets((16, 64), requests=(5, 10), emits=(2, 4)).fit(plan)
    assert (bucket.tokens, bucket.requests, bucket.emits) == (16, 5, 12)
    decode = build((DENSE,), [RequestWork(8, 1, (t.pages(0),)) for t in tables])
    bucket = Buckets((16, 64), requests=(5, 10), emits=(2, 4)).fit(decode)
    assert (bucket.tokens, bucket.requests, bucket.emits) == (5, 5, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"request_bucket_sizes": (8,)},
            "request_bucket_sizes is given only with bucket_sizes; got (8,).",
        ),
        (
            {"bucket_sizes": (512,), "request_bucket_sizes": (64,)},
            "the largest of request_bucket_sizes holds a step of 65; got 64.",
        ),
        ({"graphs": 1}, "graphs is True or False; got 1."),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(RuleError, match=r".") as error:
        EngineConfig(**{"max_running_requests": 64, **options})
    assert str(error.value).startswith(message)


def test_a_broadcast_copy_is_left_to_torch():
    column, out = torch.ones(2, 1), torch.zeros(2, 3)
    tape = Tape()
    tape.record(lambda: out.copy_(column))
    column += torch.tensor([[1.0], [2.0]])
    assert tape.replay().tolist() == [[2.0] * 3, [3.0] * 3]


def test_concatenations_of_mismatched_or_empty_tensors_are_left_to_torch():
    rows, more, none = torch.ones(2, 3), torch.ones(5, 3), torch.ones(2, 0)
    tape = Tape()
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        tape.record(lambda: torch.cat((rows, more), -1))
    tape = Tape()
    tape.record(lambda: torch.cat((rows, none), -1))
    rows += 1
    assert tape.replay().tolist() == rows.tolist()
