"""The command line: what a person types, sees and gets back. Real runs on the smallest cells."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from pkgutil import resolve_name

import pytest

from lockstep import __version__, cli, plugins
from lockstep.attention import select
from lockstep.cli import Parser
from lockstep.config import EngineConfig
from lockstep.lab import reverts
from lockstep.lab.cells import Cell, Result, apply_known_failures
from lockstep.lab.guard import Finding
from lockstep.sample.params import SamplingParams

CELL = ["--backend", "reference", "--recipe", "empty", "--feature", "dense"]


def test_help_is_quick_and_needs_no_torch():
    code = (
        "import sys\nfrom lockstep import cli\ntry: cli.main(['--help'])\nexcept SystemExit: "
        "print({'torch', 'numba'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.splitlines()[-1] == "set()", run.stdout + run.stderr
    assert "lockstep lab run" in run.stdout


@pytest.mark.parametrize(
    "command",
    [
        "",
        "lab",
        "lab run",
        "lab reverts",
        "lab matrix",
        "lab show",
        "lab mutate",
        "bench attention",
        "bench engine",
        "check-env",
    ],
)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert "examples:\n  lockstep" in capsys.readouterr().out


def test_defaults_in_the_help_of_generate_are_those_of_the_engine_and_of_sampling():
    stated = {}
    for group in cli.read_table("lockstep.llm")["generate"]["groups"].values():
        for option, words in group.items():
            found = re.search(r"\(default: ([\d.]+)\)", words.get("help", ""))
            if found:
                stated[option.removeprefix("--").replace("-", "_")] = float(found[1])
    fields = (*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingParams))
    own = {"max_tokens", "temperature"}  # the command's, in its table
    numbers = {
        field.name: float(field.default)
        for field in fields
        if type(field.default) in (int, float) and field.name not in {*own, "sample_index"}
    }
    assert stated == numbers


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lockstep {__version__}\n"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("gen", "Did you mean generate?"),
        ("lab rum", "Did you mean run?"),
        ("lap run", "Did you mean lab?"),
        ("lab run --quik", "Did you mean --quick?"),
        ("lab run --recpie decode", "Did you mean --recipe?"),
        ("lab show cpu/decode/dense --stp=1", "Did you mean --step?"),
        ("bench attention --device cpuu", "Did you mean cpu?"),
        ("lab run --workers many", "a whole number of at least 0"),
        ("bench attention --repeat 0", "a whole number of at least 1"),
        ("lab run surplus", "unexpected argument surplus"),
    ],
)
def test_a_misspelt_argument_is_reported_in_one_line_with_a_suggestion(
    line: str, hint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        cli.main(line.split())
    said = capsys.readouterr()
    assert (stop.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert hint in said.err, said.err


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("lab show decode/dense", "a cell is backend/recipe/feature"),
        ("lab show nobody/decode/dense", "a backend is one of"),
        ("lab show cpu/embed/dense", "applies to its feature"),
        ("lab show cpu/decode/llama", "a cell is backend/recipe/feature"),
        ("lab show reference/engine-hit/llama", "promises no bits"),
        ("lab show reference/empty/dense --step 9", "--step is from 0 to"),
        ("lab run --recipe decod", "Did you mean decode"),
        ("lab run --backend cpu --recipe embed --feature dense", "applies to its feature"),
        ("lab reverts --name sglang-2736", "Did you mean sglang-"),
        ("lab matrix --from nowhere.json", "nowhere.json"),
        ("lab matrix --docs nowhere", "no such folder"),
        ("lab run --list --json -", "--list only prints names; got --json"),
    ],
)
def test_a_user_error_prints_one_line(line: str, hint: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("lockstep: ") and said.err.count("\n") == 1, (
        said.err
    )
    assert hint in said.err, said.err


def parsers(parser: Parser) -> list[Parser]:
    """Returns a parser and the parsers of all commands below it."""
    below = [
        p
        for a in parser._actions
        if isinstance(a, argparse._SubParsersAction)
        for p in a.choices.values()
    ]
    return [parser, *(each for p in below for each in parsers(p))]


def test_every_command_names_a_function_that_exists():
    called = [p for p in parsers(cli.make_parser()) if p.get_default("call")]
    assert len(called) > 10
    for parser in called:
        assert callable(resolve_name(parser.get_default("call"))), parser.prog


def test_every_file_that_an_example_reads_is_in_the_checkout():
    root = Path(__file__).parents[1]
    examples = [p.format_help() for p in parsers(cli.make_parser())]
    read = [f for each in examples for f in re.findall(r"--from (bench/\S+)", each)]
    assert read and [f for f in read if not (root / f).is_file()] == []


def writing_commands() -> list[str]:
    """Returns every command with each output option it has, as typed, without the file's name."""
    found = []
    for parser in parsers(cli.make_parser()):
        needed = [
            a
            for a in parser._actions
            if a.required or (not a.option_strings and a.dest == "prompt")
        ]
        words = [w for a in needed for w in (*a.option_strings[:1], "x")]
        outputs = [option for option in parser.options() if option in ("--json", "--html")]
        found += [" ".join([*parser.prog.split()[1:], *words, option]) for option in outputs]
    return found


def test_every_command_that_writes_a_file_is_found():
    assert {
        "generate x --json",
        "lab run --html",
        "lab reverts --json",
        "bench attention --json",
        "check-env --json",
    } <= set(writing_commands())


@pytest.mark.parametrize("line", writing_commands())
def test_an_unwritable_output_file_is_reported_before_the_work_begins(
    line: str, tmp_path: Path, monkeypatch, capsys
):
    def work(args: argparse.Namespace) -> int:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(cli, "with_revert", work)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    option = line.split()[-1]
    for where, why in (
        ("file/out", "Not a directory"),
        ("folder", "Is a directory"),
        ("n" * 300, "File name too long"),
    ):
        assert cli.main([*line.split(), str(tmp_path / where)]) == 2
        said = (
            f"lockstep: the output file can be written; got {option} {tmp_path / where}: {why}. "
            "Choose another place.\n"
        )
        assert capsys.readouterr().err == said
    with pytest.raises(AssertionError, match="the work has begun"):
        cli.main([*line.split(), str(tmp_path / "new" / "out")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"], (
        "trying leaves nothing behind"
    )
    with pytest.raises(AssertionError, match="the work has begun"):
        cli.main([*line.split(), str(tmp_path / "file")])
    assert (tmp_path / "file").read_text() == "kept"


def test_two_outputs_cannot_name_the_same_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    where = str(tmp_path / "lab")
    assert cli.main(["lab", "run", *CELL, "--json", where, "--html", where]) == 2
    assert (
        capsys.readouterr().err
        == f"lockstep: --json and --html name two files; got {where}. Change one "
        "of them.\n"
    )


def test_curve_and_page_folders_are_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    assert cli.main(["bench", "engine", "--curves", "--svg-dir", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith(
        "lockstep: the output file can be written; got --svg-dir "
    )
    (tmp_path / "matrix.md").mkdir()
    assert cli.main(["lab", "matrix", "--docs", str(tmp_path)]) == 2
    assert "got --docs " in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "lab run --backend broken",
        "lab run --backend cpu,broken --list",
        "lab reverts --backend broken",
        "lab show broken/empty/dense",
    ],
)
def test_a_backend_whose_import_fails_is_reported_in_one_line(line: str, monkeypatch, capsys):
    found, group = plugins.entry_points, select.BACKENDS.group
    broken = EntryPoint("broken", "no_such_package.backend:Backend", group)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [*found(group=group), broken])
    assert cli.main(line.split()) == 2
    reason = "ModuleNotFoundError: No module named 'no_such_package'"
    remedy = "Install what it needs, or use another."
    assert (
        capsys.readouterr().err
        == f"lockstep: backend broken can be loaded; got {reason}. {remedy}\n"
    )


def test_a_misspelt_backend_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["lab", "reverts", "--backend", "cpuu"]) == 2
    assert (
        capsys.readouterr().err
        == "lockstep: a backend is installed; got 'cpuu'. Did you mean cpu?\n"
    )


def test_json_to_stdout_is_one_document_and_nothing_else(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["lab", "run", *CELL, "--json", "-", "--workers", "0"]) == 0
    said = capsys.readouterr()
    doc = json.loads(said.out)
    assert [c["cell"] for c in doc["cells"]] == ["reference/empty/dense"]
    assert doc["summary"]["backends"]["reference"]["passed"] == 1
    assert {"python", "torch", "numba", "numpy", "cpu", "cores", "platform"} <= set(
        doc["environment"]
    )
    assert "all green" in said.err


def test_the_summary_is_readable(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["lab", "run", *CELL, "--workers", "0"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[:3] == ["backend", "passed", "refused"]
    assert said[1].split()[:2] == ["reference", "1"]
    assert said[-1].endswith(": all green")


def test_a_revert_is_announced_and_reaches_the_worker_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    revert = reverts.load("sglang-26513")
    monkeypatch.setenv(reverts.ENVIRONMENT_VARIABLE, revert.name)
    recipe, feature = revert.cells[0].split("/")
    asked = [
        "--backend",
        "cpu",
        "--recipe",
        recipe,
        "--feature",
        feature,
        "--quick",
        "--workers",
        "1",
        "--json",
        "-",
    ]
    code = cli.main(["lab", "run", *asked])
    said = capsys.readouterr()
    assert f"{reverts.ENVIRONMENT_VARIABLE}={revert.name}" in said.err and revert.title in said.err
    doc = json.loads(said.out)
    assert (code, doc["revert"], doc["cells"][0]["verdict"]) == (1, revert.name, "failed")
    assert (
        f"{reverts.ENVIRONMENT_VARIABLE}={revert.name} lockstep lab run --backend cpu" in said.err
    )


def test_an_unknown_revert_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(reverts.ENVIRONMENT_VARIABLE, "sglang-26513x")
    assert cli.main(["check-env"]) == 2
    assert "Did you mean sglang-26513" in capsys.readouterr().err


def test_lab_show_prints_plan_pages_and_rows(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["lab", "show", "reference/fork/dense", "--step", "1"]) == 0
    said = capsys.readouterr().out
    for word in (
        "request 3 continues the first 16 keys of request 0",
        "q_indptr",
        "write_slots",
        "moves",
        "in pages [",
        "against float64",
    ):
        assert word in said, word
    assert cli.main(["lab", "show", "reference/empty/dense", "--json", "-"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [len(s["launches"][0]["rows"]) for s in steps] == [0, 2 * 71, 0, 2 * 2]


def test_check_env_names_backends_and_the_kernel_cache(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["check-env", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backends"]["cpu"]["available"] and found["backends"]["reference"]["available"]
    assert "lockstep" in found["kernels"]


def test_without_the_extras_check_env_works_and_the_lab_says_what_is_missing():
    extras = ("pebble", "hypothesis", "coverage", "cosmic_ray", "pytest", "matplotlib", "triton")
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({extras}))\nfrom lockstep import cli\n"
        f"print(cli.main(['check-env']), cli.main(['lab', 'run', *{CELL}]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert run.stdout.splitlines()[-1:] == ["0 2"], run.stdout + run.stderr
    line = run.stderr.splitlines()[-1]
    assert "got no module pebble" in line and "lockstep-llm[lab,bench,gpu]" in line


def test_a_known_failure_is_marked_known_and_one_that_passes_fails():
    cell = Cell("cpu", "decode", "dense")
    broken = Result(cell, "failed", "value: off", (Finding("value", False, "off"),))
    listed = {str(cell): "a cause"}
    assert apply_known_failures(broken, False, listed).verdict == "known"
    assert "a cause" in apply_known_failures(broken, False, listed).reason
    assert apply_known_failures(Result(cell, "passed"), False, listed).verdict == "failed"
    assert apply_known_failures(Result(cell, "passed"), True, listed).verdict == "passed", (
        "a quick run proves nothing"
    )
    assert apply_known_failures(broken, False, {}).verdict == "failed"
