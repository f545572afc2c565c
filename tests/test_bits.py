"""`lab bits` on small models: every path is taken, no bit differs, a bug on one path is seen."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lockstep import cli
from lockstep.lab import bits
from lockstep.lab.options import CPU
from lockstep.lab.tiny import configs
from lockstep.sched.scheduler import Scheduler

GOLDEN = configs("golden_models.json")


def job(name: str = "qwen3", *paths: str) -> bits.Job:
    return bits.Job(name, GOLDEN[name], CPU, bits.FEW, paths or tuple(bits.PATHS))


@pytest.mark.parametrize("name", bits.SMALL)
def test_no_log_probability_differs_between_the_paths_of_a_small_model(name):
    found = bits.measured(job(name))
    assert bits.faults({name: found}, {"model": 50, "path": 50}) == []
    assert list(found["paths"]) == list(bits.PATHS)
    for path in found["paths"].values():
        assert path["log_probabilities"] >= 50
        assert 2 * path["from_decode_steps"] > path["log_probabilities"]
    assert found["distance"]["ours"] < 1e-4, "transformers computes the same model"


def test_a_path_that_changes_answers_or_is_not_taken_is_a_fault(monkeypatch):
    preempt = Scheduler._preempt

    def forgetful(self, request):
        preempt(self, request)
        request.tokens[-1] = 5

    monkeypatch.setattr(Scheduler, "_preempt", forgetful)
    found = bits.measured(job("qwen3", "preemption"))
    assert "differ" in bits.faults({"qwen3": found}, {"model": 0, "path": 0})[0]
    found["paths"]["preemption"]["differ"] = 0
    found["paths"]["preemption"]["counters"]["preempted"] = 0
    (fault,) = bits.faults({"qwen3": found}, {"model": 0, "path": 0})
    assert fault == "qwen3, preemption: the path was not taken: preempted is 0"


def test_a_log_probability_differs_by_its_token_or_bits_or_if_it_is_nan_or_missing():
    want = bits.bits_of([1, 2, 3], np.array([-1.0, -2.0, -0.0]))
    assert bits.differing(want, want) == 0
    assert bits.differing(bits.bits_of([1, 2, 3], [-1.0, -2.0, 0.0]), want) == 1, "-0 is not 0"
    assert bits.differing(bits.bits_of([1, 4, 3], [-1.0, -2.5, -0.0]), want) == 1
    assert bits.differing(bits.bits_of([1, 2, 3], None), want) == 3, "they never came"
    nan = bits.bits_of([1], [np.nan])
    assert bits.differing(nan, nan) == 1, "two that are wrong alike do not agree"


def test_too_few_log_probabilities_are_a_fault_of_a_run_of_real_shapes():
    page = {"log_probabilities": 9_999, "differ": 0, "counters": {"other_pages": 1}}
    told = bits.faults({"m": {"paths": {"page": page}, "distance": None}}, bits.MANY["least"])
    few, all_few = "9,999 log-probabilities, fewer than 10,000", "9,999 over all models"
    assert told == [f"m, page: {few}", f"page: {all_few}, fewer than 125,000"]


def test_no_log_probability_at_all_is_a_fault_of_small_models_too():
    page = {"log_probabilities": 0, "differ": 0, "counters": {"other_pages": 1}}
    told = bits.faults({"m": {"paths": {"page": page}, "distance": None}}, bits.FEW["least"])
    few = "page: 0 log-probabilities, fewer than 1"
    assert told == [f"m, {few}", "page: 0 over all models, fewer than 1"]


def test_lab_bits_writes_its_findings_as_json(tmp_path, capsys):
    out = tmp_path / "bits.json"
    chosen = ["--model", "gpt_oss", "--path", "graph,overlap"]
    assert cli.main(["lab", "bits", "--small", *chosen, "--json", str(out)]) == 0
    doc = json.loads(out.read_text())
    assert doc["faults"] == [] and list(doc["models"]["gpt_oss"]["paths"]) == ["graph", "overlap"]
    assert doc["models"]["gpt_oss"]["paths"]["graph"]["counters"]["replays"] > 0
    assert "no bit differs" in capsys.readouterr().out
    assert cli.main(["lab", "bits", "--small", "--path", "grpah"]) == 2
    assert "Did you mean graph?" in capsys.readouterr().err
