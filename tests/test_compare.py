"""`bench compare`: two trees, measured in turns. No test here judges which one is faster."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from lockstep import cli
from lockstep.bench.compare import ROOT, judged, line, names, summary
from lockstep.bench.results import Timing

HEAD = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True)
in_git = pytest.mark.skipif(HEAD.returncode != 0, reason="the package lies in no git checkout")


@in_git
def test_a_case_is_measured_on_both_trees(capsys: pytest.CaptureFixture[str]):
    case = "attention decode 8/2 d64 1x1 after 511"
    cli.main(
        [
            "bench",
            "compare",
            "--base",
            "HEAD",
            "--case",
            case,
            "--repeat",
            "2",
            "--quick",
            "--json",
            "-",
        ]
    )
    document = json.loads(capsys.readouterr().out)
    (row,) = document["cases"]
    assert row["case"] == case and row["error"] == ""
    (old_s,), (new_s,) = row["old_s"], row["new_s"]
    assert len(old_s) == len(new_s) == 2 and min(*old_s, *new_s) > 0
    assert document["mean_ratio"] == document["least_ratio"] == row["ratio"]


@in_git
def test_a_missing_base_commit_is_named(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "compare", "--base", "no-such-commit", "--case", "step"]) == 2
    assert "--base names a commit of this checkout; got no-such-commit" in capsys.readouterr().err


@in_git
@pytest.mark.parametrize("command", ["compare --case attention", "step"])
def test_an_empty_base_is_refused_like_an_unknown_commit(command: str, capsys, monkeypatch):
    monkeypatch.setattr("lockstep.bench.compare.by_turns", lambda *_: pytest.fail("it measured"))
    assert cli.main(["bench", *command.split(), "--base", ""]) == 2
    assert "--base names a commit of this checkout; got no name: " in capsys.readouterr().err


def test_the_compared_cases_are_those_of_the_benchmarks():
    every = names()
    assert len(every) == len(set(every)) == 36 + 8 + 1 + 2
    assert {"decode builtin", "mixed 100m", "step", "load builtin"} <= set(every)


def compared(
    case: str, *starts: tuple[list[float], list[float]], others: float = 0.0
) -> dict[str, Any]:
    """Returns a case with some starts; each is the seconds of the old side and those of the new
    side."""
    timings = []
    for pair in starts:
        timings.append(Timing())
        for side, turns in zip(("old", "new"), pair, strict=True):
            for seconds in turns:
                timings[-1].add(side, others, {"seconds": seconds})
    return judged(case, timings)


def test_a_case_or_a_mean_below_its_floor_is_reported():
    level = compared("a", ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]))
    slow = compared("b", ([0.94, 0.94], [1.0, 1.0]))
    broken = judged("c", [], "RuntimeError: gone")
    assert level["met"] and not slow["met"] and not broken["met"]
    assert summary("x", [level])["met"] is True
    assert summary("x", [level, slow])["met"] is False, "one case below 0.95"
    near = compared("d", ([0.97], [1.0]))
    assert near["met"] and summary("x", [level, near])["met"] is False, "a mean of 0.985"
    assert line(broken) == f"LOW {'c':44} RuntimeError: gone"
    assert line(slow).endswith("940.000 ->   1000.000 ms  x0.940")


def test_several_starts_of_a_case_count_equally():
    starts = ([1.0, 2.0, 9.0], [4.0] * 3), ([8.0] * 3, [1.0, 1.0, 7.0])
    both = compared("a", *starts, others=0.5)
    assert both["old_s"] == [[1.0, 2.0, 9.0], [8.0] * 3] and len(both["new_s"]) == 2
    assert both["undisturbed"] is False
    assert both["ratio"] == 2.0, "starts count alike, whatever one of them took: 0.5 and 8"


def test_loading_is_judged_by_the_extra_seconds_it_takes():
    assert compared("load builtin", ([1.0], [1.9]))["met"]
    assert not compared("load builtin", ([1.0], [2.1]))["met"]
