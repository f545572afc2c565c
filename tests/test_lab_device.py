"""The lab on another device and in another dtype: tolerances follow the dtype, the bugs that a
backend is not proven against are reported, and traces switch on the options that an engine may
have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from lockstep import cli
from lockstep.attention.reference import attend_row
from lockstep.lab import fuzz, oracle, reverts
from lockstep.lab.attention_harness import distance
from lockstep.lab.features import FEATURES
from lockstep.lab.options import CPU, Device
from lockstep.lab.recipes import Script
from lockstep.types import Layout, RuleError

NARROW = Device("cpu", "bfloat16")


def test_a_device_has_the_rounding_unit_of_its_dtype_and_caches_in_it_by_default():
    assert (CPU.unit, NARROW.unit, Device("cpu", "float16").unit) == (2.0**-24, 2.0**-8, 2.0**-11)
    assert (CPU.flags, NARROW.flags) == ("", " --device cpu --dtype bfloat16")
    kept = {f.name: NARROW.specs(f.groups(16)) for f in FEATURES}
    assert {g.kv_dtype for g in kept["dense"]} == {"bfloat16"}
    assert {g.kv_dtype for g in kept["fp8-kv"]} == {"float8_e4m3"}
    fresh = [g for groups in kept.values() for g in groups if g.layout is Layout.FRESH]
    assert fresh and {g.kv_dtype for g in fresh} == {"float32"}, "nothing is stored"


def test_an_unknown_device_is_an_error_that_names_it():
    with pytest.raises(RuleError, match="tpu"):
        Device.of("tpu")


def test_the_tolerance_of_attention_covers_the_roundings_of_its_dtype_and_is_not_far_wider():
    """Attention weights and outputs are rounded to bfloat16, all else is float64: the error is
    within the tolerance, and not far below it."""
    feature, script = FEATURES[0].on(NARROW), Script()
    request = script.open()
    script.step(script.extend(request, 40))
    rows = oracle.values(feature.groups(16), 40, dtype=torch.bfloat16)
    assert rows[0][0].q.dtype is torch.bfloat16
    answer = oracle.answers(feature, script, rows, NARROW.unit)[0][0]
    exact = oracle.answers(feature, script, rows)[0][0]
    assert torch.equal(answer.out, exact.out) and bool((answer.out_tol > exact.out_tol).all())
    spec = feature.groups(16)[0]
    k, v = oracle.stored(spec, spec.layers[0], rows[0][0])
    used = 0.0
    for i in range(40):
        q = rows[0][0].q[i].double()
        out, lse = attend_row(q, k[: i + 1], v[: i + 1], spec.layers[0])
        error = distance(out.bfloat16().double(), answer.out[i]) / answer.out_tol[i][:, None]
        assert bool((distance(lse, answer.lse[i]) <= exact.lse_tol[i]).all())
        used = max(used, float(error.max()))
    assert 0.05 < used < 1
    far = answer.out * (1 + 6 * NARROW.unit) + 6 * answer.out_tol[..., None]
    assert bool((distance(far, answer.out) > answer.out_tol[..., None]).all())


def test_bugs_that_a_backend_is_not_proven_against_are_listed(capsys: pytest.CaptureFixture[str]):
    names = "flashinfer-1148,lockstep-score-chunk,sglang-24097"
    some = ["--backend", "reference", "--name", names, "--workers", "0"]
    assert cli.main(["lab", "reverts", *some]) == 0
    said = capsys.readouterr().out
    assert "reference is not proven against 2 bugs:" in said
    assert "flashinfer-1148       a bug in the code of cpu" in said
    assert "lockstep-score-chunk  its cells are refused: it promises no bits" in said
    assert "1 reverts in" in said and "1 killed, 0 survived" in said


def test_every_revert_of_a_backends_own_code_names_that_backend():
    for revert in map(reverts.load, reverts.names()):
        module = revert.target.partition(":")[0]
        own = module.removeprefix("lockstep.attention.").split(".")[0]
        mine = own if own in ("cpu", "triton") and "attention" in module else ""
        assert revert.backend == mine, f"{revert.name}: BACKEND = {mine!r}"


def test_each_switch_of_a_trace_is_on_in_half_of_the_traces_independently():
    drawn = Counter(fuzz.draw(seed).switches for seed in range(800))
    names = [c for n in range(4) for c in combinations(fuzz.SWITCHES, n)]
    assert set(drawn) == set(names)
    expected = 800 / len(names)
    assert all(0.6 * expected < n < 1.5 * expected for n in drawn.values()), drawn
    assert 360 < sum(fuzz.draw(seed).adaptive for seed in range(800)) < 440


def test_old_traces_keep_their_arrivals_and_bucket_sizes_follow_the_switches():
    trace = fuzz.draw(4711)
    arrivals = [(order.at, order.params.seed) for order in trace.orders]
    assert arrivals[:4] == [(2, 21), (2, 27), (5, 11), (5, 32)], "as it always was"
    assert {i: order.abort for i, order in enumerate(trace.orders) if order.abort} == {2: 13, 6: 20}
    for seed in range(40):
        trace = fuzz.draw(seed)
        sizes = trace.config.bucket_sizes
        assert (sizes is None) == (not {"padding", "buckets"} & set(trace.switches))
        if sizes is not None:
            assert len(sizes) == 1 or "buckets" in trace.switches


def test_the_draft_depths_of_a_trace_follow_from_its_seed_and_not_from_a_clock():
    trace = next(trace for trace in map(fuzz.draw, range(40)) if trace.adaptive)
    first, again = (fuzz.run(trace, fuzz.rig()) for _ in range(2))
    assert first == again and first[0] == [] and first[1]["adaptive_traces"] == 1
    _, fixed = fuzz.run(replace(trace, adaptive=False), fuzz.rig())
    guesses = [
        counts["accepted_drafts"] + counts["rejected_drafts"] for counts in (first[1], fixed)
    ]
    assert 0 < guesses[0] < guesses[1], guesses


def test_a_failing_trace_is_shrunk_to_the_request_that_fails(monkeypatch: pytest.MonkeyPatch):
    six = (trace for trace in map(fuzz.draw, range(200)) if len(trace.orders) == 6)
    trace = next(trace for trace in six if any(order.abort for order in trace.orders))
    culprit = trace.orders[3].prompt

    def run(part: fuzz.Trace, rig: object) -> tuple[list[str], Counter[str]]:
        prompts = [order.prompt for order in part.orders]
        return (["wrong"] if culprit in prompts else []), Counter()

    monkeypatch.setattr(fuzz, "run", run)
    less = fuzz.shrunk(trace, None)  # type: ignore[arg-type]
    assert [(order.prompt, order.abort) for order in less.orders] == [(culprit, None)]


@pytest.fixture
def rowwise(tmp_path: Path) -> dict[str, str]:
    """Returns the environment of a process in which the device of tests/second_device is
    installed."""
    info = tmp_path / "rowwise-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rowwise\nVersion: 1.0\n")
    devices = "[lockstep.devices]\nrowwise = rowwise_ops:Ops\nstale = rowwise_ops:StaleSlotOps\n"
    backends = "[lockstep.backends]\nrowwise = rowwise_attention:Backend\n"
    (info / "entry_points.txt").write_text(devices + backends)
    here = Path(__file__).parent
    paths = (str(here.parent), str(here / "second_device"), str(tmp_path))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(("device", "failed"), [("rowwise", 0), ("stale", 2)])
def test_cells_pass_on_a_third_party_device_and_fail_on_one_with_a_stale_slot(
    rowwise: dict[str, str], device: str, failed: int
):
    """Two cells of the quick matrix represent all of them (docs/lab.md has the command)."""
    cells = ["--recipe", "reuse,engine-page", "--feature", "dense,qwen3"]
    command = ["lab", "run", "--quick", "--device", device, "--backend", "rowwise", *cells]
    whole = [sys.executable, "-m", "lockstep.cli", *command, "--workers", "0", "--json", "-"]
    ran = subprocess.run(whole, env=rowwise, capture_output=True, text=True)
    assert ran.returncode == (1 if failed else 0), ran.stderr[-2000:]
    judged = json.loads(ran.stdout)["cells"]
    assert {cell["dtype"] for cell in judged} == {"bfloat16"}
    assert sum(cell["verdict"] == "failed" for cell in judged) == failed, ran.stderr[-2000:]
    assert len(judged) == 2
