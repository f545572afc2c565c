"""`lockstep generate`: text in, text out; a mistake is one line that states the rule, what it got,
and what to do."""

from __future__ import annotations

import io
import json

import pytest

from lockstep import cli
from lockstep.llm.engine import Engine
from lockstep.run.runner import Runner

PROMPT = "def binary_search(items, target):"


def run(capsys, *words: str) -> tuple[int, str, str]:
    """Returns the exit code, stdout and stderr."""
    try:
        code = cli.main(["generate", *words])
    except SystemExit as left:
        code = int(left.code or 0)
    return code, *capsys.readouterr()


def test_one_prompt_streams_its_text(capsys):
    code, out, told = run(capsys, PROMPT, "--max-tokens", "24", "--max-total-tokens", "2048")
    assert code == 0
    assert out.startswith(PROMPT + "\n") and len(out) > len(PROMPT) + 20
    assert (
        "attention cpu" in told
        and "gemm fma_chain: our own" in told
        and "by name" not in told
        and "cache for 2,048 tokens" in told
    )


def test_many_prompts_from_a_file_are_one_document(capsys, tmp_path):
    (tmp_path / "prompts").write_text("def add(a, b):\n\nimport os\n")
    words = (
        "--file",
        str(tmp_path / "prompts"),
        "--max-tokens",
        "6",
        "--n",
        "2",
        "--temperature",
        "0.8",
        "--seed",
        "3",
        "--logprobs",
        "1",
    )
    code, out, told = run(capsys, *words, "--json", "-")
    assert code == 0 and "generate" in told and "2/2" in told
    outputs = json.loads(out)["outputs"]
    assert [o["prompt"] for o in outputs] == ["def add(a, b):", "import os"]
    assert all(
        len(o["completions"]) == 2 and o["seed"] == 3 and "order=canonical" in o["fingerprint"]
        for o in outputs
    )
    assert all(
        len(c["logprobs"]) == len(c["token_ids"]) == 6
        for o in outputs
        for c in o["completions"]
        if c["finish_reason"] == "length"
    )
    assert [c["error"] for o in outputs for c in o["completions"]] == [None] * 4
    again = json.loads(run(capsys, outputs[1]["prompt"], *words[2:], "--json", "-")[1])["outputs"][
        0
    ]
    assert again["completions"] == outputs[1]["completions"], "alone, it is the same"


def test_stop_token_ids_prompt_logprobs_and_graphs_are_options(capsys, monkeypatch):
    words = (PROMPT, "--max-tokens", "6", "--max-total-tokens", "2048", "--json", "-")
    plain = json.loads(run(capsys, *words)[1])["outputs"][0]
    ids = plain["completions"][0]["token_ids"]
    options = ("--disable-cuda-graph", "--stop-token-ids", str(ids[2]), "--prompt-logprobs", "1")
    made, runners = Engine.__init__, list[Runner]()

    def watch(self, *args, **kwargs):
        made(self, *args, **kwargs)
        runners.append(self.runner)

    monkeypatch.setattr(Engine, "__init__", watch)
    code, out, _ = run(capsys, *words, *options)
    output = json.loads(out)["outputs"][0]
    assert code == 0 and len(ids) == 6
    run(capsys, *words)
    assert [runner.graphs for runner in runners] == [False, True]
    assert output["completions"][0]["token_ids"] == ids[: ids.index(ids[2]) + 1]
    assert output["completions"][0]["finish_reason"] == "stop"
    assert plain["prompt_logprobs"] is None and len(output["prompt_logprobs"]) > 1
    assert output["prompt_logprobs"][0] is None and "NaN" not in out, "JSON has no NaN"


def test_a_file_of_prompts_is_split_at_line_ends_alone(capsys, tmp_path):
    path = tmp_path / "prompts"
    path.write_bytes(b"\xef\xbb\xbfdef f():\x0cx\r\n\r\nimport os\n")
    words = ("--file", str(path), "--max-tokens", "1", "--max-total-tokens", "2048", "--json", "-")
    outputs = json.loads(run(capsys, *words)[1])["outputs"]
    assert [output["prompt"] for output in outputs] == ["def f():\x0cx", "import os"]


def test_a_file_of_prompts_that_is_not_utf8_is_reported_in_one_line(capsys, tmp_path, monkeypatch):
    path = tmp_path / "prompts"
    path.write_bytes(b"def\nca\xf6\n")
    code, out, told = run(capsys, "--file", str(path))
    assert (code, out) == (2, "")
    line = (
        f"a file of prompts is text in UTF-8; got {str(path)!r}: byte 0xF6 in line 2. Convert it, "
        "as with iconv."
    )
    assert told == f"lockstep: {line}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert run(capsys, "--file", "-") == (2, "", told.replace(repr(str(path)), "'-'"))


def test_a_json_document_is_written_to_a_folder_that_is_created(capsys, tmp_path):
    path = tmp_path / "not" / "there" / "out.json"
    code, out, _ = run(capsys, "x =", "--max-tokens", "2", "--json", str(path))
    assert code == 0 and out.startswith("--- 'x =' [0]")
    assert len(json.loads(path.read_text())["outputs"]) == 1


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ((), "generate needs a prompt"),
        (("",), "a prompt has at least one token"),
        (("x = 1\n" * 3000,), "a prompt has at most 2048 tokens; got "),
        (("x", "--max-tokens", "0"), "max_tokens"),
        (("x", "--max-tokens", "-1"), "max_tokens"),
        (("x", "--max-tokens", "1000000000"), "max_tokens"),
        (
            ("x", "--max-tokens", "5000"),
            "context of 2048; got 1 + 5000. Use max_tokens of at most 2047",
        ),
        (("x", "--temperature", "nan"), "temperature"),
        (("x", "--temperature", "-1"), "temperature"),
        (("x", "--temperature", "1e-320"), "temperature"),
        (("x", "--top-p", "0"), "top_p"),
        (("x", "--top-k", "-2"), "top_k"),
        (("x", "--min-p", "2"), "min_p"),
        (("x", "--n", "0"), "n is a whole number from 1 to 128"),
        (("x", "--n", "1000000000"), "n is a whole number from 1 to 128"),
        (("x", "--logprobs", "1000000"), "logprobs"),
        (("x", "--stop", ""), "stop"),
        (("x", "--stop", "a" * 300), "stop"),
        (("x", "--logit-bias", "4096=1"), "logit_bias names tokens from 0 to 4095; got 4096"),
        (("x", "--logit-bias", "abc"), "an id and a number"),
        (("x", "--logit-bias", "1=nan"), "logit_bias"),
        (("x", "--temprature", "1"), "Did you mean --temperature?"),
        (
            ("x", "--file", "/nowhere/at/all"),
            "--file names a text file with one prompt per line; got '/nowhere/at/all': No such "
            "file",
        ),
        (
            ("x", "--file", "/"),
            "--file names a text file with one prompt per line; got '/': Is a directory",
        ),
        (
            ("x\udcff",),
            "a text is valid Unicode; got U+DCFF, a lone surrogate, at character 1. Decode it "
            "with its own encoding",
        ),
        (("x", "--json", ""), "--json names a file; got ''. Use - for stdout."),
        (
            ("x", "--json", "/"),
            "the output file can be written; got --json /: Is a directory. Choose another place.",
        ),
        (("x", "--model", ""), "model is a folder or a hub id of the form owner/name; got ''"),
        (("x", "--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("x", "--model", "../../etc"), "etc"),
        (("x", "--page-size", "0"), "a whole number of at least 1"),
        (("x", "--device", "cuda0"), "a device is one of cpu"),
        (("x", "--attention-backend", "cpi"), "cpi"),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_a_mistake_is_reported_in_one_line(capsys, words, rule):
    code, out, told = run(capsys, *words)
    assert code == 2
    assert rule in told and "Traceback" not in told
    assert len(told.strip().splitlines()[-1]) < 600
    assert not out
