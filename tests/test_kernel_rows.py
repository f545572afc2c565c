"""Norms, rotations and gates of the CPU, and the threads that help: right, and the same bits in any company."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from lockstep.kernels.cpu import gemm, rows, threads

SIZES = [5, 16, 40, 64, 72, 256, 1407]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def invariant(f, *per_row: torch.Tensor) -> torch.Tensor:
    """f of all rows, having seen that every row is the same alone, at the end of a few, and with one thread."""
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
    assert (have - torch.rms_norm(x.double(), [n], weight.double(), 1e-6)).abs().max() < 2e-6 * n**0.5
    heads = noise(9, 7, n)[:, 2:5]
    assert torch.equal(
        invariant(lambda x: rows.rms_norm(x, weight, 1e-6), heads), rows.rms_norm(heads.reshape(-1, n), weight, 1e-6).view(9, 3, n)
    )


@pytest.mark.parametrize("n", SIZES)
def test_a_sum_and_its_norm(n):
    x, more, weight = noise(40, n), noise(40, n + 3, seed=5)[:, :n], noise(n, seed=1)
    total, have = rows.add_norm(x, more, weight, 1e-6)
    assert torch.equal(total, x + more)
    assert torch.equal(have, rows.rms_norm(x + more, weight, 1e-6))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "half"), [(8, 4), (16, 8), (64, 32), (64, 16), (72, 20), (10, 2)])
def test_rotation(d, half, interleaved):
    x, angle = noise(60, 9, d)[:, 3:8], noise(60, half, seed=2)
    part = x[..., : 2 * half]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    want = torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)
    assert torch.equal(invariant(lambda x, c, s: rows.rotate(x, c, s, interleaved), x, cos[:, 0], sin[:, 0]), want)


@pytest.mark.parametrize(("d", "half"), [(8, 4), (64, 32), (64, 16), (72, 20)])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_and_rotated_together(d, half, normed):
    x, angle = noise(60, 9, d), noise(60, half, seed=2)
    weights = (noise(d, seed=3), noise(d, seed=4))
    parts = x[:, :8].split((6, 2), 1)
    want = [rows.rotate(rows.rms_norm(p, w, 1e-6) if normed else p, angle.cos(), angle.sin(), False) for p, w in zip(parts, weights)]
    have = rows.place_heads(x.flatten(1), rows.Heads(6, 2, d, 1e-6), weights if normed else None, (angle.cos(), angle.sin()))
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize("n", SIZES)
def test_silu_gate(n):
    x = noise(200, 2 * n) * 40
    gate, up = x.double().chunk(2, -1)
    want = gate * torch.sigmoid(gate) * up
    have = invariant(lambda x: rows.gate(rows.SILU, x), x)
    assert ((have - want).abs() <= 2.0**-23 * (3 + gate.abs()) * want.abs() + 1e-33).all()  # e⁻ˣ inherits the rounding of x·log2 e


def test_what_is_not_a_number_stays_so():
    x = torch.tensor([[float("nan"), 1, float("inf"), float("-inf"), 0, 1, 1, 1, 1, 1]])
    assert rows.gate(rows.SILU, x).isfinite().tolist() == [[False, True, False, False, True]]
    assert rows.rms_norm(x, torch.ones(10), 1e-6).isnan().all()


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8)])
def test_no_rows(shape):
    assert rows.rms_norm(torch.zeros(shape), torch.ones(8), 1e-6).shape == shape


def product() -> bool:
    """Whether a GEMM with several threads is what it is with one."""
    weight, x = gemm.pack(noise(500, 70), None), noise(64, 70, seed=1)
    with threads.limited(1):
        want = gemm.matmul(x, weight, 500)
    with threads.limited(4):
        return all(torch.equal(gemm.matmul(x, weight, 500), want) for _ in range(50))


def test_more_threads_than_processors():
    assert product()
    assert len(threads.HELP.threads) >= 3


def test_helpers_come_back_after_they_were_sent_home():
    assert product()
    threads.HELP.leave()
    assert not threads.HELP.threads
    assert product()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_helpers_of_its_own():
    """The child does nothing but multiply: OpenMP, which torch uses for large tensors, does not survive a fork."""
    weight, x = gemm.pack(noise(500, 70), None), noise(9, 70, seed=1)
    with threads.limited(2):
        want = gemm.matmul(x, weight, 500)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            alone = not threads.HELP.threads
            same = all(np.array_equal(gemm.matmul(x, weight, 500).numpy(), want.numpy()) for _ in range(50))
            os._exit(0 if alone and same and len(threads.HELP.threads) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_call_does_not_wait_for_a_helper_that_is_asleep():
    """Nothing is served by helpers that were told to leave: the caller does it all."""
    threads.HELP.leave()
    weight, x = gemm.pack(noise(500, 70), None), noise(9, 70, seed=1)
    with threads.limited(1):
        want = gemm.matmul(x, weight, 500)
    mailbox = threads.HELP.address  # nobody looks into it
    y = torch.empty(9, 500)
    entries = (x.data_ptr(), 280, weight.data_ptr(), y.data_ptr(), 9, 70, 500, len(weight), len(weight), 4, 0, 0)
    record = np.array(entries, np.int64)
    threads.compiled()[0](gemm.work().address, 3, mailbox, record.ctypes.data)
    assert torch.equal(y, want)
