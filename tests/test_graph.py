"""What GPU graphs rely on, tested without a GPU: launches that sample, ids that are samples of the
previous step, buckets that growing requests stay in, an arena with two places, weights drawn at
random."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep.attention import select as backends
from lockstep.attention.triton import few_rows
from lockstep.config import EngineConfig
from lockstep.kernels import select as devices
from lockstep.lab import tiny
from lockstep.llm import engine as engines
from lockstep.llm import rows as launches
from lockstep.llm.engine import Engine
from lockstep.models import loader
from lockstep.plan.bucket import RECORDED_ROWS, Buckets, pad
from lockstep.plan.build import build
from lockstep.plan.step import Bucket, Real
from lockstep.run import runner as runners
from lockstep.run.graph import Graph, captures
from lockstep.run.kind import DRAFTS, GENERATE
from lockstep.run.runner import (
    SETTING,
    Runner,
    StepOutput,
    null_work,
    read_settings,
    resolve_ids,
    write_settings,
)
from lockstep.run.step import Arena
from lockstep.run.tape import Tape
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import Settings
from lockstep.types import GroupSpec, Layout, RuleError

SIZES = {"page_size": 8, "context_length": 160, "max_running_requests": 8}
CONFIG = EngineConfig(max_total_tokens=1024, **SIZES)


class Event:
    """An event of a device that is always ready."""

    def record(self) -> None:
        """Records nothing: there is nothing to wait for."""

    def synchronize(self) -> None:
        """Returns immediately: everything has happened."""


@pytest.fixture(scope="module")
def parts() -> engines.Parts:
    return tiny.parts(tiny.QWEN3, backends.load("cpu"))


def answers(engine: Engine) -> list[object]:
    lens = (3, 40, 7, 11, 20)
    jobs = [
        engine.add(
            tiny.words(n, n),
            SamplingParams(
                max_tokens=12,
                temperature=0.8 * (n % 2),
                top_k=5 if n == 7 else -1,
                seed=n,
                logprobs=2 if n % 3 else None,
                frequency_penalty=0.5 if n == 11 else 0.0,
            ),
        )
        for n in lens
    ]
    while engine.busy:
        engine.step()
    firsts = [job.output("").completions[0] for job in jobs]
    return [(c.token_ids, repr(c.logprobs), repr(c.top_logprobs)) for c in firsts]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_launch_that_includes_sampling_gives_the_same_answers(
    parts: engines.Parts, overlap: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(launches, "on_host", torch.clone)
    want = answers(Engine(CONFIG, parts))
    engine = Engine(replace(CONFIG, graphs=graphs), parts, overlap)
    engine.on_gpu = True
    told: list[str] = []
    if graphs:
        engine.runner.buckets = Buckets.for_decoding(8, 20, 258)
        engine.runner.capture(engine.kinds["generate"], told.append)
        assert [line.split(":")[1].split()[0] for line in told] == ["8", "4", "2", "1"]
    assert answers(engine) == want
    assert sum(tape.replays for tape in engine.runner.tapes.values()) >= 5 * graphs


def test_the_samples_of_a_step_are_copied_to_the_host_and_a_chunk_has_none(
    parts: engines.Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launches, "on_host", torch.clone)
    engine = Engine(EngineConfig(max_total_tokens=400, chunked_prefill_size=8), parts, overlap=True)
    engine.add(tiny.words(12, 1), SamplingParams(max_tokens=3, logprobs=2))
    engine.step()
    assert engine._launched[0].fetch().chosen is None
    engine.step()
    (launched,) = engine._launched
    there, here = launched.chosen, launched.fetch().chosen
    assert there is not None and there.logprobs and here is not None and here.logprobs
    for a, b in (
        (there.token_ids, here.token_ids),
        (there.states, here.states),
        *zip(there.logprobs, here.logprobs, strict=True),
    ):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


def test_pad_rows_are_removed_from_outputs_of_any_width() -> None:
    """Three rows are emitted, and padded to four, of three columns each."""
    states = torch.arange(12.0).reshape(4, 3)
    out = StepOutput(states, states, logits=states, next_hidden=states)
    one = StepOutput(states[:3], states).without_pads(Real(requests=1, tokens=3, emits=3))
    assert len(one.emitted) == 3
    every = out.without_pads(Real(requests=1, tokens=2, emits=3))
    assert [len(x) for x in (every.rows, every.emitted, every.logits, every.next_hidden)] == [
        2,
        3,
        3,
        3,
    ]
    assert out.without_pads(Real(requests=1, tokens=4, emits=4)) is out


def test_ids_below_zero_refer_to_samples_of_the_previous_step() -> None:
    ids, sampled = torch.tensor([7, -1, -3, 0], dtype=torch.int32), torch.tensor([40, 41, 42])
    assert resolve_ids(ids, sampled).tolist() == [7, 40, 42, 0]


def test_sampling_settings_round_trip_as_int32_and_pad_rows_are_greedy() -> None:
    floats = torch.tensor([[0.6, 0.9, -1.5], [0.1, 1.0, 0.0]], dtype=torch.float64)
    ints = torch.arange(10).view(2, 5) + 2**40
    room = np.full(3 * SETTING, 9, np.int32)
    write_settings(room, Settings(floats, ints, True))
    how = read_settings(room, True)
    assert torch.equal(how.floats[:2], floats) and torch.equal(how.ints[:2], ints) and how.cuts
    assert not how.floats[2].any() and not how.ints[2].any()


def test_growing_requests_stay_in_one_bucket(parts: engines.Parts) -> None:
    specs = parts.model.groups(8)
    buckets = Buckets((1, 2, 4), widths=(1,), request_pages=20, most_pages=64)
    plans = {n: build(specs, [null_work(specs, 1, (0,))] * n) for n in (1, 2, 4)}
    bucket = buckets.fit(plans[4])
    assert pad(plans[4], bucket).bucket == bucket and bucket.pages == (64, 64)  # 80 would be 128
    assert buckets.fit(plans[2]).pages == (64, 64) and buckets.fit(plans[1]).pages == (32, 32)
    assert Buckets((4,)).fit(plans[1]).pages == (16, 16)  # one page for every pad request


@pytest.mark.parametrize(
    ("running", "sizes"),
    [(1, (1,)), (3, (1, 2, 4)), (200, (1, 2, 4, 8, 16, 32, 64, 128, 192, 256))],
)
def test_the_largest_bucket_holds_all_running_requests(
    running: int, sizes: tuple[int, ...]
) -> None:
    assert Buckets.for_decoding(running, 7, 50).tokens == sizes
    assert Buckets.for_decoding(600, 7, 50).tokens[-1] == 1024


def test_only_steps_that_may_run_twice_are_captured() -> None:
    sizes = {"requests": 4, "tokens": 4, "emits": 4, "pages": (8,), "writes": (4,)}
    assert captures(Bucket(width=1, tail=0, moves=(0,), **sizes))
    for width, moves in ((0, 0), (2, 0), (1, 3)):
        assert not captures(Bucket(width=width, tail=0, moves=(moves,), **sizes))
    verify = Bucket(width=2, tail=2, moves=(0,), **sizes)
    assert captures(verify, (1, 2)) and not captures(verify, (1, 4))


def test_a_step_with_more_rows_per_request_than_the_capture_limit_is_not_captured():
    """A tree of 25 nodes used to be captured again and again, since launches of wide steps depend
    on the requests' lengths; on a GPU no graph was ever dropped."""
    shape = {"requests": 2, "emits": 2, "tail": 0, "moves": (0,), "pages": (8,), "writes": (2,)}
    for width, few in ((RECORDED_ROWS, True), (RECORDED_ROWS + 1, False), (25, False)):
        bucket = Bucket(width=width, tokens=2 * width, **shape)
        assert captures(bucket, (1, width)) == few_rows(bucket) == few


def test_a_gpu_captures_decode_and_verify_steps_but_no_prompts_of_the_same_width(parts):
    runner = Engine(CONFIG, parts, overlap=True).runner
    runner.graphs, runner.every, runner.studio = True, False, object()
    runner.buckets = Buckets.for_decoding(8, 64, 600, (1, 7))
    sizes = {"requests": 2, "tail": 0, "moves": (0,), "pages": (8,), "writes": (14,)}
    decode = Bucket(width=1, tokens=2, emits=2, **sizes)
    verify = Bucket(width=7, tokens=14, emits=14, **sizes)
    prompts = replace(verify, emits=2)
    generate, extend = (SimpleNamespace(name=name) for name in (GENERATE, DRAFTS[-1]))
    found = [runner._records(generate, bucket) for bucket in (decode, verify, prompts)]
    assert found == [True, True, False]
    assert runner._records(extend, prompts), "a draft's missing rows emit the last one"


class FakeGraph:
    """A CUDA graph that logs its calls; `fault` is raised by the call that it names."""

    def __init__(self, fault: str, error: BaseException, ended: list[str]) -> None:
        self.fault, self.error, self.log = fault, error, ended

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads may use the GPU"
        self.call("begin")

    def capture_end(self) -> None:
        self.call("end")
        if self.fault:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self.call("replay")

    def call(self, name: str) -> None:
        self.log.append(name)
        if name == self.fault:
            raise self.error


@pytest.mark.parametrize(
    ("fault", "error"),
    [("begin", KeyboardInterrupt()), ("launch", torch.OutOfMemoryError("no room")), ("", None)],
)
def test_a_failed_capture_is_ended_and_its_own_error_is_raised(fault, error, monkeypatch):
    """An interrupt right after the capture began used to leave the stream capturing."""
    log: list[str] = []
    made = FakeGraph(fault, error, log)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    tape, runs = Graph(SimpleNamespace(stream=None, pool=None)), [0]

    def launch() -> int:
        runs[0] += 1
        if runs[0] > 1:
            made.call("launch")
        return runs[0]

    with pytest.raises(type(error)) if error else nullcontext():
        tape.record(launch)
    if error:
        assert log[-1] == "end" and "replay" not in log
    else:
        assert log == ["begin", "launch", "end", "replay"] and tape.output == 2


def test_a_launch_whose_capture_lacks_memory_runs_uncaptured_after_two_tries(parts, monkeypatch):
    """Its step used to fail, and the next one with it, for as long as the engine lived."""
    tries: list[Tape] = []

    class Cramped(Tape):
        def record(self, launch):
            tries.append(self)
            launch()
            raise torch.OutOfMemoryError("no room in the capture")

    want = answers(Engine(CONFIG, parts, overlap=True))
    engine = Engine(replace(CONFIG, graphs=True), parts, overlap=True)
    monkeypatch.setattr(runners, "Tape", Cramped)
    assert answers(engine) == want
    assert not engine.runner.tapes and set(engine.runner._failed.values()) <= {1, 2}
    assert len(tries) == engine.runner._failed.total() > 4
    assert 2 in engine.runner._failed.values(), "a second try, in case memory has become free"


def test_an_arena_on_a_gpu_alternates_two_buffers_and_waits_for_their_copies() -> None:
    arena = Arena(16, torch.device("cpu"))
    waited: list[int] = []

    class Copied(Event):
        def __init__(self, at: int) -> None:
            self.at = at

        def query(self) -> bool:
            return len(waited) == 2  # the third copy has run

        def synchronize(self) -> None:
            waited.append(self.at)

    arena._slots.append(torch.zeros(16, dtype=torch.int32))
    arena._arrays.append(arena._slots[1].numpy())
    arena._copied = [Copied(0), Copied(1)]
    for value in (1, 2, 3):
        arena.host(4)[:] = value
        assert arena.load(4).tolist() == [value] * 4
    assert waited == [1, 0]
    assert arena._slots[1][:4].tolist() == [3] * 4 and arena._slots[0][:4].tolist() == [2] * 4


def test_dummy_weights_are_drawn_from_a_config_alone(tmp_path: Path) -> None:
    tiny.save(tiny.QWEN3, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RuleError, match=r"holds model\.safetensors"):
        loader.load(tmp_path)
    drawn = EngineConfig(device="cpu", load_format="dummy")
    first, again = (loader.load(tmp_path, drawn) for _ in range(2))
    assert first.info.weights == "dummy-0"
    weights = [each.model.norm.weight for each in (first, again)]
    assert torch.equal(*weights) and 0.9 < float(weights[0].mean()) < 1.1
    assert torch.equal(first.model.embedding.weight, again.model.embedding.weight)


def test_auto_selects_a_known_gpu_and_otherwise_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert devices.find() == ("cpu", "no GPU is visible")
    assert devices.select("auto")[1].reason.startswith("no GPU is visible, computes in float32")
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(cuda, "get_device_capability", lambda: (8, 0))
    assert devices.find() == ("cpu", "NVIDIA A100 is sm_80; only sm_90 is supported")
    monkeypatch.setattr(cuda, "get_device_capability", lambda: (9, 0))
    assert devices.find().name == "cuda"


def test_weights_that_a_gpu_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        device, dtype = torch.device("cuda"), torch.bfloat16

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    loader.check_room(Card(), 500)
    with pytest.raises(RuleError, match="1,000 B that are free on the GPU; got 501 of 2 B = 1,002"):
        loader.check_room(Card(), 501)


def test_the_cache_has_the_dtype_of_the_activations_unless_another_is_set() -> None:
    assert EngineConfig().settled("bfloat16").kv_cache_dtype == "bfloat16"
    assert EngineConfig(kv_cache_dtype="float32").settled("bfloat16").kv_cache_dtype == "float32"


def test_attention_items_beyond_one_per_block_are_rounded_up_to_few_sizes() -> None:
    from lockstep.attention.triton import Backend, Launch, most_items, room_for, round_launch
    from lockstep.kernels.triton import launch
    from lockstep.types import AttnSpec

    assert [room_for(n) for n in (0, 1, 16, 17, 256, 257)] == [0, 16, 16, 64, 256, 512]
    one = round_launch(Launch(launch.DECODE, 70, 99, 64), 4)
    assert one == Launch(launch.DECODE, 80, 80 * 4, 64)
    spec = GroupSpec(Layout.DENSE, 32, 8, 128, 128, (AttnSpec(0.1),), kv_dtype="bfloat16")
    sizes = {"requests": 64, "tokens": 64, "emits": 64, "writes": (64,), "moves": (0,)}
    bucket = Bucket(width=1, tail=0, pages=(8192,), **sizes)
    assert most_items(spec, bucket) == 64 + 512  # one split per 512 keys, and one per request
    few = (Launch(launch.DECODE, 64, 0, 64),)
    assert [each.items for (each,) in Backend().wider(spec, bucket, few)] == [80, 128, 320]
    assert Backend().wider(spec, replace(bucket, width=0), few) == ()


def test_a_gemm_with_more_rows_than_its_grid_is_computed_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lockstep.kernels.triton import gemm_choice

    calls: list[int] = []

    def library(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return torch.mm(x, w.t(), out=y)

    monkeypatch.setattr(gemm_choice, "GRID", (1, 4))
    monkeypatch.setattr(gemm_choice, "placed_alike", lambda *tensors: True)
    choices = dict.fromkeys((1, 4), library)
    x, w, y = torch.randn(9, 8), torch.randn(3, 8), torch.full((9, 3), torch.nan)
    assert gemm_choice.multiply(choices, x, w, y) is y
    assert calls == [4, 4, 1] and torch.allclose(y, x @ w.t(), atol=1e-5)


def test_a_step_that_samples_more_tokens_than_the_runner_can_keep_is_refused():
    room = 4
    runner = Runner.__new__(Runner)
    runner.sampled = torch.zeros(room, dtype=torch.int64)
    runner.keep(torch.tensor([5, -1, 7]))
    assert runner.sampled.tolist() == [5, 0, 7, 0]
    with pytest.raises(RuleError, match=r"at most 4 tokens.*5"):
        runner.keep(torch.arange(room + 1))
