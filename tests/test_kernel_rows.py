"""Norms, rotations and gates of the CPU, and the helper threads: right, and the same bits in every
batch."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.kernels.cpu import attend, cache, gemm, rows, threads
from lockstep.kernels.cpu import sample as sampling
from lockstep.kernels.cpu.ops import Ops
from lockstep.ops import Activation, CosSin, Heads
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import Row, RowBatch, sample

SIZES = [5, 16, 40, 64, 72, 256, 1407]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def invariant(f, *per_row: torch.Tensor) -> torch.Tensor:
    """Returns f of all rows, after checking that rows have the same bits alone, at the end of a few
    rows, and with one thread."""
    with threads.limited(2):
        want = f(*per_row)
    with threads.limited(1):
        assert torch.equal(f(*per_row), want)
    for i in (0, 1, len(want) // 2, len(want) - 1):
        assert torch.equal(f(*(x[i : i + 1] for x in per_row))[0], want[i])
        assert torch.equal(f(*(x[max(0, i - 2) : i + 1] for x in per_row))[-1], want[i])
    return want


@pytest.mark.parametrize("n", SIZES)
def test_rms_norm(n):
    weight = noise(n, seed=1)
    x = noise(300, n) * 3
    have = invariant(lambda x: rows.rms_norm(x, weight, 1e-6), x)
    assert (
        have - torch.rms_norm(x.double(), [n], weight.double(), 1e-6)
    ).abs().max() < 2e-6 * n**0.5
    heads = noise(9, 7, n)[:, 2:5]
    assert torch.equal(
        invariant(lambda x: rows.rms_norm(x, weight, 1e-6), heads),
        rows.rms_norm(heads.reshape(-1, n), weight, 1e-6).view(9, 3, n),
    )


@pytest.mark.parametrize("n", SIZES)
def test_add_rms_norm_has_the_bits_of_an_addition_and_a_norm(n):
    x, more, weight = noise(40, n), noise(40, n + 3, seed=5)[:, :n], noise(n, seed=1)
    total, have = rows.add_rms_norm(x, more, weight, 1e-6)
    assert torch.equal(total, x + more)
    assert torch.equal(have, rows.rms_norm(x + more, weight, 1e-6))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "half"), [(8, 4), (16, 8), (64, 32), (64, 16), (72, 20), (10, 2)])
def test_rope_has_the_bits_of_a_plain_rotation(d, half, interleaved):
    x, angle = noise(60, 9, d)[:, 3:8], noise(60, half, seed=2)
    part = x[..., : 2 * half]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    want = torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)
    assert torch.equal(
        invariant(lambda x, c, s: rows.rope(x, CosSin(c, s), interleaved), x, cos[:, 0], sin[:, 0]),
        want,
    )


@pytest.mark.parametrize(("d", "half"), [(8, 4), (64, 32), (64, 16), (72, 20)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_are_normed_and_rotated_together(d, half, normed, interleaved):
    x, angle = noise(60, 9, d), noise(60, half, seed=2)
    weights, cos_sin = noise(2, d, seed=3), CosSin(angle.cos(), angle.sin())
    parts = x[:, :8].split((6, 2), 1)
    want = [
        rows.rope(rows.rms_norm(p, w, 1e-6) if normed else p, cos_sin, interleaved)
        for p, w in zip(parts, weights)
    ]
    heads = Heads(6, 2, d, 1e-6, interleaved)
    *have, v = rows.qk_norm_rope(x.flatten(1), heads, weights if normed else None, cos_sin)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(have, want, strict=True))
    assert torch.equal(v, x[:, 8:]) and v.data_ptr() == x[:, 8:].data_ptr()


@pytest.mark.parametrize("n", SIZES)
def test_silu_and_mul(n):
    x = noise(200, 2 * n) * 40
    gate, up = x.double().chunk(2, -1)
    want = gate * torch.sigmoid(gate) * up
    have = invariant(lambda x: rows.act_and_mul(x, Activation.SILU), x)
    assert (
        (have - want).abs() <= 2.0**-23 * (3 + gate.abs()) * want.abs() + 1e-33
    ).all()  # e⁻ˣ inherits the rounding of x·log2 e


FUNCTIONS = {
    Activation.SILU: lambda x: x * torch.sigmoid(x),
    Activation.GELU: torch.nn.functional.gelu,
    Activation.GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Activation.RELU: torch.relu,
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_activations_and_their_gates(kind, n):
    x = noise(60, 2 * n) * 4
    have = invariant(lambda x: rows.activate(x, kind), x)
    assert (have - FUNCTIONS[kind](x.double())).abs().max() < 2e-6
    assert torch.equal(rows.activate(x[3:4, 5:], kind), have[3:4, 5:]), "any place"
    gate, up = x.chunk(2, -1)
    got = invariant(lambda x: rows.act_and_mul(x, kind), x)
    assert torch.equal(got, rows.activate(gate, kind) * up)


def test_the_sigmoid():
    x = noise(60, 72) * 4
    have = invariant(rows.sigmoid, x)
    assert (have - torch.sigmoid(x.double())).abs().max() < 2e-6


@pytest.mark.parametrize("n", SIZES)
def test_the_clamped_gate(n):
    x = noise(60, 2 * n) * 6
    gate, up = x.double().chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    have = invariant(lambda x: rows.clamped_swiglu(x, 1.702, 7.0), x)
    assert (have - (up + 1) * gate * torch.sigmoid(1.702 * gate)).abs().max() < 2e-5
    assert (
        rows.clamped_swiglu(torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]]), 1.702, 7.0)
        .isnan()
        .all()
    )


def test_a_soft_cap():
    x = noise(5, 1407) * 50
    have = invariant(lambda x: rows.soft_cap(x, 30.0), x)
    assert (have - torch.tanh(x.double() / 30) * 30).abs().max() < 1e-5


@pytest.mark.parametrize("n", SIZES)
def test_layer_norm(n):
    weight, bias = noise(n, seed=1), noise(n, seed=2)
    x = noise(60, n) * 3 + 5
    have = invariant(lambda x: rows.layer_norm(x, weight, bias, 1e-5), x)
    assert (
        have - torch.layer_norm(x.double(), [n], weight.double(), bias.double(), 1e-5)
    ).abs().max() < 3e-6 * n**0.5


@pytest.mark.parametrize("n", [1, 3, *SIZES])
def test_softmax_and_shares(n):
    x = noise(60, n) * 5
    have = invariant(rows.softmax, x)
    want = torch.softmax(x.double(), -1)
    below = (x - x.amax(-1, keepdim=True)).abs()
    assert (
        (have - want).abs() <= 2.0**-23 * (4 + below) * want
    ).all()  # the power inherits the rounding of x·log2 e
    parts = x.abs()
    want = parts.double() / (parts.double().sum(-1, keepdim=True) + 0.25)
    assert ((invariant(lambda x: rows.shares(x, 0.25), parts) - want).abs() <= 2e-6 * want).all()


def test_softmax_of_nan_and_infinity():
    nan, inf = float("nan"), float("inf")
    x = noise(4, 20)
    x[0, 3], x[1, 18], x[2, 5] = nan, nan, -inf
    have = rows.softmax(x)
    assert have.isnan().any(1).tolist() == [True, True, False, False]
    assert have[2, 5] == 0


def test_pooling_is_rounded_once():
    """The mean of rows, divided by its length: what 60-digit arithmetic would give, but for one
    number in 2^29."""
    x = noise(90, 72)
    have = rows.pool(x, [(0, 3), (3, 77), (89, 90), (0, 90)])
    for row, (a, b) in zip(have, [(0, 3), (3, 77), (89, 90), (0, 90)], strict=True):
        mean = x[a:b].double().mean(0)
        assert torch.equal(row, (mean / mean.norm()).float())
    assert torch.equal(rows.pool(torch.zeros(2, 5), [(0, 2)]), torch.zeros(1, 5))
    assert rows.pool(x, []).shape == (0, 72)


@pytest.mark.parametrize("half", [1, 4, 20, 28, 56, 64])
def test_rope_angles_have_the_rounded_cos_and_sin_of_float64(half):
    freqs = torch.logspace(0, -5, half)
    positions = torch.cat((torch.arange(50), torch.arange(131000, 131072)))
    cos, sin = rows.rope_cos_sin(positions, freqs, 1.0)
    angle = (positions.float()[:, None] * freqs).double()
    assert torch.equal(cos, angle.cos().float()) and torch.equal(sin, angle.sin().float())
    for part in (0, 1):
        assert torch.equal(
            invariant(lambda p, part=part: rows.rope_cos_sin(p, freqs, 1.0)[part], positions.int()),
            (cos, sin)[part],
        )
        assert torch.equal(rows.rope_cos_sin(positions, freqs, 1.3)[part], (cos, sin)[part] * 1.3)


def test_nan_and_infinity_stay_nonfinite_in_gates_and_norms():
    x = torch.tensor([[float("nan"), 1, float("inf"), float("-inf"), 0, 1, 1, 1, 1, 1]])
    assert rows.act_and_mul(x, Activation.SILU).isfinite().tolist() == [
        [False, True, False, False, True]
    ]
    assert rows.rms_norm(x, torch.ones(10), 1e-6).isnan().all()


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8)])
def test_rms_norm_accepts_zero_rows(shape):
    assert rows.rms_norm(torch.zeros(shape), torch.ones(8), 1e-6).shape == shape


@pytest.mark.parametrize("shape", [(3, 3, 16), (3, 1, 16), (2, 2, 16), (4, 2, 16)])
def test_rows_of_another_shape_than_the_cache_are_refused_and_nothing_is_written(shape):
    memory = torch.zeros(12, 2, 16)
    with pytest.raises((IndexError, RuntimeError), match="index_copy_"):
        Ops.kv_write(memory[2:8], torch.tensor([5, 1, 0], dtype=torch.int32), noise(*shape), 1.0)
    assert not memory.any()


@pytest.mark.parametrize("slot", [-1, 8])
def test_rows_for_a_slot_outside_the_pool_are_refused_and_nothing_is_written(slot):
    storage, x = torch.zeros(10, 2, 20)[1:9], noise(3, 2, 20)
    with pytest.raises(IndexError, match="out of bounds for axis 0 with size 8"):
        Ops.kv_write(storage, torch.tensor([5, slot, 0], dtype=torch.int32), x, 1.0)
    assert not storage._base.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "x", [noise(5, 7, 20)[:, 2:4], noise(5, 2, 1).expand(5, 2, 20)], ids=["heads", "columns"]
)
def test_rows_written_to_the_cache_may_be_strided_and_slots_int32_or_int64(x, dtype):
    storage, slots = torch.zeros(9, 2, 20), torch.tensor([8, 0, 3, 4, 1], dtype=dtype)
    Ops.kv_write(storage, slots, x, 1.0)
    assert torch.equal(storage[slots], x) and not storage[[2, 5, 6, 7]].any()


@pytest.fixture(autouse=True)
def every_call_is_worth_all_threads(monkeypatch):
    """Otherwise small calls would run without helpers."""
    monkeypatch.setattr(threads, "THREAD_NS", 1)


def product(most: int = 4) -> bool:
    """Returns whether a GEMM with several threads has the bits that it has with one."""
    weight, x = gemm.pack(noise(500, 70), None), noise(64, 70, seed=1)
    with threads.limited(1):
        want = gemm.linear(x, weight)
    with threads.limited(most):
        return all(torch.equal(gemm.linear(x, weight), want) for _ in range(50))


def test_more_threads_than_processors_give_the_same_bits():
    assert product()
    assert len(threads.HELPERS.threads) >= 3


def test_helpers_start_again_after_they_have_left():
    assert product()
    threads.HELPERS.stop()
    assert not threads.HELPERS.threads
    assert product()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_helpers_of_its_own_and_torch_one_thread():
    """OpenMP, which torch uses for large tensors, does not survive a fork: a child that sampled
    with penalties used to wait for its threads forever."""
    weight, x = gemm.pack(noise(500, 70), None), noise(9, 70, seed=1)
    logits, params = noise(64, 4096), SamplingParams(temperature=0, frequency_penalty=1.0)
    rows_of = RowBatch.of([Row(params, 1, 0, np.zeros(1, np.int32))] * 64)
    before = torch.get_num_threads()
    with threads.limited(2):
        want = gemm.linear(x, weight)
        chosen = sample(Ops(), logits, rows_of).token_ids
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            alone = not threads.HELPERS.threads
            same = all(torch.equal(gemm.linear(x, weight), want) for _ in range(50))
            same &= torch.equal(sample(Ops(), logits, rows_of).token_ids, chosen)
            helped = len(threads.HELPERS.threads) == 1 and threads.HELPERS.inherited == before
            os._exit(0 if alone and same and helped else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("shares", [1, 4])
def test_a_call_does_not_wait_for_a_helper_that_is_asleep(shares):
    """The helpers were told to leave and serve nothing: the caller does all the work."""
    threads.HELPERS.stop()
    weight, x = gemm.pack(noise(500, 70), None), noise(9, 70, seed=1)
    with threads.limited(1):
        want = gemm.linear(x, weight)
    y = torch.empty(9, 500)
    panels = weight.numbers.shape[1]
    where = (x.data_ptr(), 280, weight.numbers.data_ptr(), y.data_ptr(), 2000)
    board = threads.HELPERS.address  # no helper inspects it
    entries = (*where, 9, 70, 500, panels, 1, 4, 0, 0, 0, 12)
    head = (gemm.work().address, panels, 4, 0, 0, 0, shares, threads.HEAD + len(entries), 0)
    for call in (threads.compiled().call, threads.compiled().released):
        record = np.array((*head, *entries), np.int64)
        y.zero_()
        call(record.ctypes.data, 1, 3, board, threads.OWN.counters)
        assert torch.equal(y, want)


def test_threads_that_call_simultaneously_share_the_helpers_and_keep_their_bits():
    """There are more callers than desks; a caller that finds none free works alone."""
    begin = threading.Barrier(12)

    def together(_: int) -> bool:
        begin.wait()
        return product(3)

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(together, range(12)))


def test_a_thread_limit_applies_to_the_calling_thread_and_not_to_torch():
    before = torch.get_num_threads()
    with threads.limited(before + 3), ThreadPoolExecutor(1) as pool:
        assert threads.thread_count() == before + 3 and torch.get_num_threads() == before
        assert pool.submit(threads.thread_count).result() == before
    assert threads.thread_count() == before


def test_a_call_has_as_many_threads_as_its_work_is_worth(monkeypatch):
    monkeypatch.setattr(threads, "THREAD_NS", 5_000)
    with threads.limited(16):
        wants = {(64, 4_999): 1, (64, 10_000): 2, (64, 10**9): 16, (3, 10**9): 3, (0, 10**9): 1}
        assert {key: threads.team(*key) for key in wants} == wants


def test_a_calling_thread_keeps_the_memory_of_its_workers_and_shares_it_with_no_other():
    each, team = 1 << 12, 5
    begin = threads.memory(each, team)
    memory, _ = threads.OWN.memory
    assert begin % 64 == 0 and begin + each * team <= threads.address_of(memory) + len(memory)
    assert threads.memory(each, team) == threads.memory(each, 1) == begin
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(threads.memory, each, team).result() != begin


@pytest.mark.parametrize("units", [0, 1, 3, 4, 29])
def test_every_unit_is_claimed_once_and_an_absent_workers_share_by_the_other_workers(units):
    """Worker 2 of four never arrives."""
    counters = np.zeros(4 * threads.LINE, np.int64)
    record = np.array((0, units, 4, 0, 0, counters.ctypes.data, 4, 0), np.int64)
    found, left = [], [0, 1, 3]
    while left:
        for worker in list(left):
            unit = threads.claim(record.ctypes.data, worker)
            if unit < 0:
                left.remove(worker)
            else:
                found.append(unit)
    assert sorted(found) == list(range(units))
    assert units < 4 or found[:3] == [0, 1, 3]  # each takes its own share first


@pytest.mark.parametrize("panels", [1, 4, 64])
@pytest.mark.parametrize("team", [1, 2, 16])
def test_units_of_a_gemm_are_whole_micro_kernels_and_enough_for_all_threads(panels, team):
    for count in (1, 5, 6, 7, 64, 95, 96, 97, 512, 2000):
        each = gemm.unit_rows(count, panels, team)
        assert each % gemm.PANEL_ROWS == 0 and 0 < each <= gemm.UNIT_ROWS
        full = each == gemm.PANEL_ROWS or panels * -(-count // each) >= 2 * team
        assert full or team == 1, (count, panels, team, each)


def test_every_source_file_of_a_kernel_is_among_those_that_name_its_cache_folder():
    """The files of the sampler's formulas used to be left out: after a change of a formula the old
    kernel stayed in use."""
    names = {**vars(attend.elementary), **vars(attend), **vars(sampling)}.values()
    texts = [text for text in names if inspect.isfunction(text) and "lockstep" in text.__module__]
    assert {Path(text.__code__.co_filename) for text in texts} <= set(cache.sources())


def test_a_long_call_releases_the_interpreters_lock():
    """Meanwhile another thread continues: its longest pause is only a part of the call."""
    weight, x = gemm.pack(noise(2048, 1024), None), noise(4096, 1024, seed=1)
    gaps, done = [0.0], threading.Event()

    def count() -> None:
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            gaps[0], last = max(gaps[0], now - last), now

    thread = threading.Thread(target=count)
    with threads.limited(1):
        gemm.linear(x[:6], weight)  # compiles it
        thread.start()
        begin = time.perf_counter()
        gemm.linear(x, weight)
        took = time.perf_counter() - begin
    done.set()
    thread.join()
    assert gaps[0] < took / 2, (gaps, took)
