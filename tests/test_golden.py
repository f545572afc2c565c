"""Recorded answers: every bit of them, on the versions with which they were recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.lab import golden
from lockstep.lab.golden import MODELS
from lockstep.models.loader import model_types
from lockstep.types import RuleError

FILE = Path(__file__).parent / "golden.json"


def test_every_recorded_answer_still_has_its_bits():
    found, counters = golden.answers()
    assert golden.compare(FILE, found) == []
    assert all(counters[path] > 0 for path in golden.PATHS), counters
    assert len(found) >= 300


def test_every_model_type_has_recorded_answers():
    assert sorted(MODELS) == model_types()


def test_a_changed_bit_a_lost_request_and_unknown_versions_are_reported(tmp_path: Path):
    file = tmp_path / "golden.json"
    paths = dict.fromkeys(golden.PATHS, 1)
    answers = {"a/0": {"tokens": [[1, 2]], "logprobs": ["00"]}, "a/1": {"logprobs": ["01"]}}
    assert golden.record(file, answers, paths) == 2 and golden.compare(file, answers) == []
    changed = {**answers, "a/1": {"logprobs": ["02"]}}
    assert golden.compare(file, changed) == ["a/1: logprobs differs"]
    assert golden.compare(file, {"a/0": answers["a/0"]}) == [
        "a/1: recorded, but no longer requested"
    ]
    with pytest.raises(
        RuleError, match="a recorded answer never changes; got a/1: logprobs differs"
    ):
        golden.record(file, changed, paths)
    assert golden.record(file, {**answers, "b/0": {"tokens": [[3]]}}, paths) == 1, (
        "entries may be added"
    )
    file.write_text(json.dumps({"another order": {}}))
    with pytest.raises(RuleError, match="the golden file has answers for order cpu-1"):
        golden.compare(file, answers)


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("none.json", "", "has answers for order cpu-1.*; got answers for nothing"),
        ("", "", "the golden file is readable JSON"),
        ("", "--write", "can be written; got --file .*Is a directory"),
    ],
)
def test_an_invalid_golden_file_is_reported_before_the_work_begins(
    file: str, line: str, message: str, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(golden, "answers", lambda *_: pytest.fail("it was worked"))
    assert cli.main(["lab", "golden", "--file", str(tmp_path / file), *line.split()]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("line", ["", "--write"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "the golden file is readable JSON; got "),
        ("[1,2]", "the golden file is an object of answers by key; got "),
        ("null", "the golden file is an object of answers by key; got "),
        ('{"a key": 1}', "the golden file is an object of answers by key; got "),
    ],
)
def test_a_golden_file_of_another_form_is_refused_and_kept(
    text: str, message: str, line: str, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(golden, "answers", lambda *_: pytest.fail("it was worked"))
    file = tmp_path / "golden.json"
    file.write_text(text)
    assert cli.main(["lab", "golden", "--file", str(file), *line.split()]) == 2
    assert message in capsys.readouterr().err and file.read_text() == text


def test_answers_are_not_recorded_unless_every_path_was_taken(tmp_path: Path):
    with pytest.raises(RuleError, match="none with preempted"):
        golden.record(tmp_path / "golden.json", {}, {"hit_tokens": 3, "forked": 1})


def test_the_values_of_a_tensor_are_a_function_of_its_name():
    first, again = (
        golden.draw_tensor("model.layers.0.mlp.up_proj.weight", (3, 5)) for _ in range(2)
    )
    other = golden.draw_tensor("model.layers.1.mlp.up_proj.weight", (3, 5))
    assert first.equal(again) and not first.equal(other)
