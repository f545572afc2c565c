"""What people read is true: the API pages build and are current, what they say about tensors is
what an engine passes, and every example runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import api  # noqa: E402
import measure  # noqa: E402
import ruler  # noqa: E402

EXAMPLES = {  # file → options that keep it short, and what it must print
    "same_bits.py": ([], "same bits  at temperature 0, with the head"),
    "backend.py": (
        ["--recipe", "decode", "--feature", "dense,window,sinks", "--workers", "0"],
        "example       2        1 ",  # sinks are refused
    ),
}


def test_the_api_pages_build_and_match_the_source():
    run = [sys.executable, "tools/api.py", "--check"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "def f(q: Tensor) -> None: ...",
        'def f(q: Tensor) -> None:\n    """q [T, heads]"""',
        'def f(q: Tensor) -> Tensor:\n    """q float32 [T]"""',
        'def f(q: Tensor) -> tuple[Tensor, Tensor]:\n    """q float32 [T]; returns float32 [T]"""',
        "class A:\n    x: Tensor  # [T] rows",
        "class A:\n    x: Ints  # rows",
    ],
)
def test_a_tensor_documented_without_dtype_and_shape_stops_the_api_pages(text: str):
    module = api.Module("x.py", text.splitlines(), api.ast.parse(text))
    node: Any = module.tree.body[0]
    made = api.klass(module, node) if text[0] == "c" else api.function(module, node, "x", "##")
    with pytest.raises(api.Undocumented):
        list(made)


def bind(known: dict[str, int], shape: str, actual: tuple[int, ...]) -> None:
    """Checks that a symbol means one number across all tensors of a call. Other expressions may be
    anything."""
    symbols = shape.split(", ")
    assert len(symbols) == len(actual), (shape, actual)
    for symbol, n in zip(symbols, actual):
        base, _, more = symbol.partition("+")
        if base.isidentifier():
            assert known.setdefault(base, n - int(more or 0)) == n - int(more or 0), (shape, actual)


def judge(said: list[api.Array], tensors: dict[str, Any]) -> None:
    """Checks that the tensors of one call are what a page says about them."""
    known: dict[str, int] = {}
    for array in (a for a in said if tensors.get(a.name) is not None):
        tensor = tensors[array.name]
        dtypes = ("activations", "kv_dtype", "integers", str(tensor.dtype).rpartition(".")[2])
        assert isinstance(tensor, torch.Tensor) and array.dtype in dtypes, array
        heads = array.name in ("x", "y") and tensor.ndim == 3  # of a norm or a GEMM
        if array.shape != "as x" and not (heads and array.shape in ("t, n", "t, k")):
            bind(known, array.shape, tuple(tensor.shape))


def test_the_documented_arrays_of_attend_are_what_engines_pass(monkeypatch: pytest.MonkeyPatch):
    from lockstep.attention import cpu, select
    from lockstep.config import EngineConfig
    from lockstep.lab import tiny
    from lockstep.llm.engine import Engine
    from lockstep.sample.params import SamplingParams

    protocol: Any = api.read("attention/base.py").find("Backend")
    (method,) = (n for n in protocol.body if getattr(n, "name", "") == "attend")
    documented = (method, api.read("kv/pool.py").find("Keys"))
    said = [a for node in documented for a in api.arrays(api.ast.get_docstring(node))]
    assert [a.name for a in said] == ["q", "out", "lse", "k", "v"]
    old, calls = cpu.Backend.attend, []

    def attend(self: Any, q: Any, keys: Any, handle: Any, spec: Any) -> Any:
        out, lse = old(self, q, keys, handle, spec)
        judge(said, {"q": q, "out": out, "lse": lse, "k": keys.k, "v": keys.v})
        assert q.dtype == out.dtype
        calls.append(len(q))
        return out, lse

    monkeypatch.setattr(cpu.Backend, "attend", attend)
    parts = tiny.parts(tiny.DEEPSEEK, select.load("cpu"))
    engine = Engine(EngineConfig(max_total_tokens=256), parts)
    engine.add(tiny.words(18, 18), SamplingParams(max_tokens=2, temperature=0))
    while engine.busy:
        engine.step()
    assert {18, 1} <= set(calls)


def test_the_documented_arrays_of_a_plan_are_those_that_build_makes():
    from lockstep.plan.build import RequestPages, RequestWork, build, table_len
    from lockstep.types import AttnSpec, GroupSpec, Layout

    spec = GroupSpec(
        layout=Layout.DENSE,
        heads=2,
        kv_heads=1,
        d_qk=8,
        d_v=8,
        layers=(AttnSpec(1.0),),
        page_size=4,
    )
    none = np.zeros(0, np.int32)
    works = [
        RequestWork(
            cached, new, (RequestPages(np.array(pages, np.int32), 0, none, none.reshape(0, 2)),)
        )
        for cached, new, pages in ((0, 3, [1]), (5, 1, [2, 3]))
    ]
    plan, known = build((spec,), works), dict[str, int]()
    module = api.read("plan/step.py")
    for value, name in ((plan, "StepPlan"), (plan.groups[0], "PagedGroup")):
        owner: Any = module.find(name)
        for field in (f for f in owner.body if isinstance(f, api.ast.AnnAssign)):
            if "Ints" in api.ast.unparse(field.annotation):
                array = getattr(value, field.target.id)
                bind(known, module.comment(field).partition("]")[0][1:], array.shape)
                assert array.dtype == np.int32 and not array.flags.writeable, field.target.id
    assert (known["B"], known["T"], known["S"], known["P"], known["W"]) == (
        2,
        4,
        2,
        table_len(3),
        4,
    )


@pytest.mark.parametrize("name", ["LLAMA", "DEEPSEEK", "GPT_OSS", "GEMMA2", "BART"])
def test_the_documented_arrays_of_operations_are_those_an_engine_passes_and_gets(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    from lockstep.attention import select
    from lockstep.config import EngineConfig
    from lockstep.lab import tiny
    from lockstep.llm.engine import Engine
    from lockstep.sample.params import SamplingParams

    calls: set[str] = set()
    table = type(tiny.CPU.ops)  # models make new tables of this class

    def spy(method: Any, old: Any) -> Any:
        said = api.arrays(api.ast.get_docstring(method))
        names = [arg.arg for arg in method.args.args[1:]]
        results = [array.name for array in said if array.name not in names]

        def call(*args: Any, **keywords: Any) -> Any:
            out = old(*args, **keywords)
            given = dict(zip(names, args)) | keywords
            given |= dict(zip(results, out if isinstance(out, tuple) else (out,)))
            given.pop("storages", None)  # a list of tensors
            judge(said, given)
            calls.add(method.name)
            return out

        return call

    protocol: Any = api.read("ops.py").find("Ops")
    for method in (n for n in protocol.body if isinstance(n, api.Function)):
        if method.name != "pack":  # takes one matrix or several
            old = getattr(table, method.name)
            monkeypatch.setattr(table, method.name, staticmethod(spy(method, old)))
    parts = tiny.parts(getattr(tiny, name), select.load("cpu"))
    engine = Engine(EngineConfig(max_total_tokens=256), parts)
    params = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, seed=1, logprobs=2, n=2)
    for prompt in (tiny.words(18, 18), tiny.words(7, 7)):
        engine.add(prompt, params)
    while engine.busy:
        engine.step()
    assert {"linear", "sample_tokens", "compute_logprobs", "kv_write"} <= calls
    special = {"DEEPSEEK": "batched_linear", "GPT_OSS": "clamped_swiglu", "BART": "layer_norm"}
    assert special.get(name, "rms_norm") in calls


def test_every_name_in_the_glossary_is_a_name_in_the_code():
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "lockstep").rglob("*.py"))
    words = set(re.findall(r"\w+", code))
    named = re.findall(r"`([^`]+)`", (ROOT / "docs" / "glossary.md").read_text("utf-8"))
    names = {
        part for name in named if not name.startswith("lab ") for part in re.split(r"\W", name)
    }
    assert len(names) > 10
    assert not names - words - {"code", "py", "docs", "md", ""}


def test_the_files_listed_for_each_kind_of_change_exist_and_are_few():
    text = (ROOT / "docs" / "design.md").read_text("utf-8")
    table = text.partition("## What a change touches")[2].partition("\n## ")[0]
    counts: dict[str, int] = {}
    for line in re.findall(r"^\|(?! to add| ---)(.*)\|$", table, re.M):
        what, files, _ = (cell.strip() for cell in line.split("|"))
        named = re.findall(r"`([^`]+\.py)`", files)
        what = what or list(counts)[-1]
        counts[what] = counts.get(what, 0) + len(named)
        for name in named:
            found = (ROOT / "lockstep").glob(name.replace("<name>", "cpu"))
            assert list(found), f"{name}: no such file"
    assert 0 < counts["a device"] <= 6
    assert 0 < counts["a KV dtype"] <= 4
    assert 0 < counts["a sampling parameter"] <= 5


def test_every_example_is_run_by_a_test():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str):
    options, said = EXAMPLES[name]
    done = subprocess.run(
        [sys.executable, f"examples/{name}", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout, done.stdout


def test_the_pre_commit_hooks_run_what_make_check_runs():
    recipe = re.search(r"\ncheck:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text())
    commands = [" ".join(line.split("/")[1].split()[:2]) for line in recipe[1].splitlines()]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert commands == ["ruff check", "ruff format", "mypy --strict"]
    assert [f"entry: .venv/bin/{command}" in hooks for command in commands] == [True] * 3


def test_the_ruler_counts_every_file_once_and_names_an_exceeded_limit():
    judges = ruler.SHARES[-1]
    lines = {
        "lockstep/plan/step.py": 100,
        "lockstep/kernels/triton/gemm.py": 15,
        "lockstep/attention/triton.py": 5,
        "lockstep/spec/verify.py": 7,
        "lockstep/lab/cells.py": 3,
        "lockstep/lab/reverts/bug.py": 4000,
        "lockstep/bench/engine.py": 5,
    }
    assert [ruler.share_lines(lines, share) for share in ruler.SHARES] == [100, 120, 127, 8]
    lines["lockstep/lab/cells.py"] = judges.limit
    (found,) = (line for line in ruler.complaints(lines, []) if "lab and bench" in line)
    assert f"{judges.limit + 5} lines; the limit is {judges.limit}" in found


def test_the_code_measures_of_a_small_file_are_right(tmp_path: Path):
    text = '''"""Doc."""

def f(aa, b):
    """A docstring does not count."""
    c = 1 if aa else 2
    return g(1, 2, 3, 4, 5, 6), g(*aa, 2, 3, 4, 5, 6), c
'''
    (tmp_path / "a.py").write_text(text)
    row = measure.row("x", [tmp_path / "a.py"]).split(" | ")
    assert row[1] == "6" and row[2] == "4 / 4 / 4"
    assert row[4:7] == ["56", "200.0", "200.0"]
    assert row[7:] == ["1.3 letters", "0.0 % |"]
