"""The benchmark of the whole engine: its command, its document, its plots. No test here judges
speed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from lockstep import cli
from lockstep.bench import contender, results
from lockstep.bench.contender import QUICK, HostTimes
from lockstep.bench.engine import TABLE, draw_curves
from lockstep.bench.results import Timing
from lockstep.bench.work import mixed_lens, prompts
from lockstep.types import RuleError

QUICKLY = ["bench", "engine", "--quick", "--model", "builtin", "--peer", "none"]
PLACE = {
    "command": "lockstep bench engine",
    "cpu": "a <fast> one",
    "threads": 2,
    "torch": "2",
    "transformers": "5",
    "numba": "0",
    "commit": "c",
}


def case(**changes: object) -> dict[str, object]:
    """Returns a case of a document."""
    base = {
        "case": "mixed builtin",
        "kind": "mixed",
        "model": "builtin",
        "unit": "tokens per second",
        "limit": None,
        "met": True,
    }
    base |= {
        "values": {"lockstep": 400.0, "static": 100.0},
        "ratios": {"static": 4.0},
        "targets": {"static": 2.5},
    }
    return base | {"undisturbed": True, "more": {}} | changes


def test_drafts_are_measured_against_plain_decoding(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "speculative", "--quick", "--json", "-"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [each["targets"]["plain"] for each in cases] == [1.15, 0.97, 1.3, 0.95]
    right, wrong = cases[2]["more"], cases[3]["more"]
    assert right["accepted"] > 0 == wrong["accepted"], (right, wrong)
    assert all(each["ratios"]["plain"] > 0 and each["met"] is None for each in cases)


def test_the_command_writes_one_document(capsys: pytest.CaptureFixture[str]):
    assert cli.main([*QUICKLY, "--case", "decode", "--json", "-"]) == 0
    said = capsys.readouterr()
    doc = json.loads(said.out)
    assert {
        "python",
        "torch",
        "transformers",
        "cpu",
        "cores",
        "commit",
        "threads",
        "command",
    } <= set(doc["environment"])
    (decode,) = doc["cases"]
    assert (decode["case"], decode["unit"], decode["met"]) == (
        "decode builtin",
        "ms per token",
        None,
    ), "no peer, nothing to judge"
    assert (
        decode["values"]["lockstep"] > 0
        and len(decode["runs"]["lockstep"])
        == len(decode["others"]["lockstep"])
        == doc["repeat"]
        == 1
    )
    assert doc["models"]["builtin"]["parameters"] == 7_607_552
    assert "decode builtin" in said.err


def test_results_of_saved_documents_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    low = case(
        case="mixed 100m",
        model="100m",
        met=False,
        more={"errors": {"continuous": "MemoryError: none left"}},
    )
    start = case(
        case="start builtin",
        kind="start",
        unit="s",
        limit=6.0,
        values={"lockstep": 2.5},
        ratios={},
        targets={},
    )
    doc = {"environment": PLACE, "quick": False, "repeat": 3, "cases": [case(), low, start]}
    path = tmp_path / "doc.json"
    path.write_text(json.dumps(doc))
    assert cli.main(["bench", "engine", "--from", str(path)]) == 1, "a target was missed"
    first, second, third, total = capsys.readouterr().out.splitlines()
    assert first.startswith("ok ") and "static x4.00 (>= 2.5)" in first
    assert second.startswith("LOW") and "continuous failed: MemoryError: none left" in second
    assert "(<= 6)" in third and "2 of 3" in total and "mixed 100m" in total
    assert cli.main(["bench", "engine", "--from", str(path), "--markdown"]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {8}, "every row has the same columns"
    assert any("transformers static batch | 100 | 4.00 | ≥ 2.5, reached" in row for row in rows)
    assert any("≤ 6, reached" in row for row in rows)


def test_a_disturbed_run_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With one of two cores taken, a competitor that spins at barriers was twenty times slower: a
    fine ratio, and a wrong one."""
    path = tmp_path / "doc.json"
    path.write_text(
        json.dumps(
            {
                "environment": PLACE,
                "quick": False,
                "repeat": 3,
                "cases": [case(met=None, undisturbed=False)],
            }
        )
    )
    assert cli.main(["bench", "engine", "--from", str(path)]) == 1
    line, total = capsys.readouterr().out.splitlines()
    assert (
        line.startswith("-- ")
        and line.endswith("disturbed")
        and "disturbed, so not judged: mixed builtin" in total
    )


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--from nowhere.json", "nowhere.json"),
        ("--case start --model 100m", "start is measured with builtin"),
        ("--threads 4096", "--threads is at most"),
        ("--row ngram --quick", "--row needs --speculative; got --row ngram"),
        ("--row ngram --device cuda", "--row needs --speculative; got --row ngram"),
    ],
)
def test_a_user_error_prints_one_line(line: str, hint: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "engine", *line.split()]) == 2
    said = capsys.readouterr()
    assert (
        said.out == ""
        and said.err.startswith("lockstep: ")
        and said.err.count("\n") == 1
        and hint in said.err
    ), said.err


@pytest.mark.parametrize(
    ("line", "hint"),
    [("--case decod", "Did you mean decode?"), ("--peer vllm", "none of transformers, none")],
)
def test_a_bad_case_or_peer_gets_a_hint(line: str, hint: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "engine", *line.split()])
    assert stop.value.code == 2 and hint in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[1, 2]", "null"])
@pytest.mark.parametrize("command", ["bench engine", "lab matrix"])
def test_a_file_that_is_no_document_is_refused(command: str, text: str, tmp_path: Path, capsys):
    path = tmp_path / "doc.json"
    path.write_text(text)
    assert cli.main([*command.split(), "--from", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lockstep: --from names a document of") and said.count("\n") == 1, said


def test_curves_missing_in_a_file_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "doc.json"
    path.write_text(json.dumps({"environment": PLACE, "quick": False, "repeat": 3, "cases": []}))
    assert (
        cli.main(["bench", "engine", "--from", str(path), "--curves", "--svg-dir", str(tmp_path)])
        == 2
    )
    assert "a document with curves" in capsys.readouterr().err


def met(
    targets: dict[str, float], *, others: float = 0.0, quick: bool = False, **how: object
) -> bool | None:
    """Returns whether 18 ms for Lockstep and 27 ms for the peer `static` meet these targets."""
    timing = Timing()
    for name, ms in {"lockstep": 18.0, "static": 27.0}.items():
        timing.add(name, others, ms)
    bench = results.Bench(Namespace(repeat=1, quick=quick, threads=None))
    return bench.result(timing, "ms", targets, **how)["met"]


def test_targets_are_judged_only_in_full_undisturbed_runs():
    assert met({"static": 1.5}) is True
    assert met({"static": 1.6}) is False
    assert met({"continuous": 1.5}) is False, "a peer that gives no number has missed its target"
    assert met({}) is None
    assert met({"static": 1.6}, quick=True) is None
    assert met({"static": 1.6}, others=0.5) is None
    assert [met({}, limit=ms) for ms in (18.0, 17.9)] == [True, False]


def test_every_case_of_the_table_can_be_printed():
    targets = [each.get("targets", {}) for each in TABLE["cases"]]
    cases = [case(**{"targets": {}, **each}) for each in TABLE["cases"]]
    for aims, made in zip(targets, cases, strict=True):
        made["values"] = {"lockstep": 400.0, **dict.fromkeys(aims, 100.0)}
        made["ratios"] = dict.fromkeys(aims, 4.0)
    doc = {"environment": PLACE, "quick": False, "repeat": 3, "cases": cases}
    rows = [line for line in results.markdown(doc).splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + sum(max(1, len(aims)) for aims in targets)


def test_a_disturbed_measurement_is_repeated_with_new_prompts(monkeypatch: pytest.MonkeyPatch):
    """The same prompt again would hit the prefix cache, and look fast."""
    monkeypatch.setattr(results, "OTHERS", -1.0)  # nothing is undisturbed
    monkeypatch.setattr(results, "PATIENCE_S", 0.0)
    seen: list[int] = []
    timing = results.alternate({"a": lambda seed: seen.append(seed) or float(seed)}, 2, tries=2)
    assert seen == [1, 2, 3, 4, 5, 6] and not timing.undisturbed
    assert len(timing.runs["a"]) == len(timing.others["a"]) == 2


def test_prompts_of_a_workload_are_a_function_of_the_seed():
    assert prompts((5, 9), 100, 3) == prompts((5, 9), 100, 3) != prompts((5, 9), 100, 4)
    assert prompts((9,), 100, 3)[0][:5] == prompts((5,), 100, 3)[0], (
        "a shorter prompt is the beginning of a longer one"
    )
    ins, outs = mixed_lens(32, (16, 512), (16, 256))
    assert (len(ins), min(ins) >= 16, max(ins) <= 512, min(outs) >= 16, max(outs) <= 256) == (
        32,
        True,
        True,
        True,
        True,
    )


def test_curves_are_drawn_with_the_name_of_the_hardware(tmp_path: Path):
    """A line may end early; the same numbers give the same file."""
    measured = {
        "requests": {"x": [1, 2], "unit": "u", "context": 128, "lines": {"Lockstep": [1.0, 2.0]}},
        "context": {"x": [1, 2, 4], "unit": "u", "lines": {"a": [3, 9, 30], "b": [2, 5]}},
    }
    doc = {"curves": measured, "environment": PLACE}
    first, again = (draw_curves(doc, str(tmp_path / name)) for name in ("docs", "again"))
    titles = ["Decode throughput, built-in model, context 128", "A decode step by context length"]
    for path, other, title in zip(first, again, titles, strict=True):
        words = {
            "".join(t.itertext()) for t in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")
        }
        assert {title, "a <fast> one, 2 threads, fp32, commit c"} <= words
        assert {
            "Decode throughput, built-in model, context 128",
            "A decode step by context length",
        } & words
        assert path.read_bytes() == other.read_bytes()


def test_the_time_of_a_part_of_a_step_excludes_the_parts_it_calls(monkeypatch):
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(contender, "perf_counter", lambda: now[0])
    times = HostTimes()
    inner = times.timed("check", lambda: sleep(2))
    outer = times.timed("build", lambda: (sleep(1), inner()))
    found = times.step(lambda: (outer(), sleep(3)))
    assert {part: t for part, t in found.items() if t} == {
        **{"build": 1, "check": 2, "other": 3},
        "host": 6,
    }


def test_host_times_are_measured_in_every_module_that_imported_a_function(capsys):
    from lockstep.bench.contender import host_times
    from lockstep.bench.work import Ours
    from lockstep.llm import engine

    ours, before = Ours(None), vars(engine).copy()
    found = host_times(ours, QUICK)
    none = {part for part, t in found["medians"].items() if not t}
    assert none == {"pad", "sample"}, "it does not pad, and what is replayed samples"
    assert vars(engine) == before, "what was replaced is put back"


def test_two_engines_in_two_threads_have_the_bits_of_one():
    """A small part of `lockstep bench threads`."""
    from lockstep.bench.threads import two_engines
    from lockstep.config import EngineConfig
    from lockstep.llm.api import LLM
    from lockstep.llm.engine import Engine, load

    config = EngineConfig(max_total_tokens=4096, disable_radix_cache=True)
    parts, threads = load(config), torch.get_num_threads()
    llms = [LLM.of(Engine(config, parts)) for _ in range(2)]
    bench = results.Bench(Namespace(repeat=1, quick=True, threads=None))
    found = two_engines(llms, 16, bench)
    assert found["ratios"]["one"] > 0 and found["more"]["tokens"] > 16
    other = LLM.of(Engine(config, parts))
    generate = other.generate
    other.generate = lambda prompts, params: generate(prompts[::-1], params)
    with pytest.raises(RuleError, match="change no bit"):
        two_engines([llms[0], other], 16, bench)
    assert torch.get_num_threads() == threads


def test_a_case_of_bench_kernels_is_measured_with_its_switch_on_and_off(capsys):
    assert cli.main(["bench", "kernels", "--quick", "--case", "kept", "--json", "-"]) == 0
    said = capsys.readouterr()
    (row,) = json.loads(said.out)["cases"]
    assert row["case"].startswith("kept batch: ") and row["more"]["done"] in said.err
    assert row["values"]["lockstep"] > 0 and row["values"]["off"] > 0
    assert row["ratios"]["off"] > 0 and row["met"] is None


def test_a_case_of_bench_kernels_that_matches_nothing_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("lockstep.bench.kernels.switches", lambda _: pytest.fail("it measured"))
    assert cli.main(["bench", "kernels", "--quick", "--case", "nope"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said
    assert "--case is the beginning of a switch: gemm; " in said.err and "got nope. " in said.err
