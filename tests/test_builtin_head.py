"""The built-in model's EAGLE head: its file, and a tiny run of the script that trained it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lockstep.attention import reference
from lockstep.attention.select import select
from lockstep.config import EngineConfig
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.llm.engine import BUILTIN, Engine, Parts
from lockstep.llm.output import Speculated
from lockstep.models import loader
from lockstep.plan.build import RequestWork, build
from lockstep.run.kind import GENERATE, group_specs, kinds_of
from lockstep.run.runner import Runner, Share, StepDriver
from lockstep.sample.params import SamplingParams
from lockstep.spec import eagle3
from lockstep.spec.draft import DraftSetup
from lockstep.text import Tokenizer
from lockstep.types import Layout

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_head", ROOT / "tools/train_head.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_head"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target() -> loader.Loaded:
    return loader.load(BUILTIN)


def setup(target: loader.Loaded, path: Path | None = None) -> DraftSetup:
    named = None if path is None else str(path)
    config = EngineConfig(speculative_algorithm="eagle3", speculative_draft_model=named)
    return DraftSetup(config.settled("float32"), target, first_group=0, rows=64)


def test_the_built_in_model_includes_its_eagle3_head(target):
    head = eagle3.load(setup(target))
    files = list((BUILTIN / "eagle3").iterdir())
    assert {file.name for file in files} == {"config.json", "model.safetensors"}
    assert sum(file.stat().st_size for file in files) <= 4 << 20
    assert head.logits(torch.zeros(2, 256)).shape == (2, 4096)


def test_the_committed_training_record_is_that_of_the_committed_head():
    file = BUILTIN / "eagle3" / "model.safetensors"
    made = json.loads((ROOT / "bench/results/head-training.json").read_text())
    assert made["weights_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    weights = {n: w for n, w in load_file(file).items() if n not in ("d2t", "t2d")}
    assert made["parameters"] == sum(weight.numel() for weight in weights.values())


@pytest.mark.parametrize("top_k", [1, 4])
def test_answers_with_the_head_have_the_bits_of_plain_decoding(target, plain, top_k):
    options = {"speculative_eagle_topk": top_k, "speculative_num_steps": 3}
    got, counts = answers(target, speculative_algorithm="eagle3", **options)
    assert got == plain[0] and counts.accepted > counts.drafted // (5 * top_k), counts
    assert counts.accepted < counts.drafted


@pytest.fixture(scope="module")
def plain(target) -> Any:
    return answers(target)


def answers(target: loader.Loaded, **options: Any) -> tuple[list[Any], Speculated]:
    """Returns the answers of a batch of mixed parameters, and the counts of draft tokens."""
    backend, choice = select(None, target.model.groups(), "cpu", "float32")
    tokenizer, certificate = Tokenizer.from_folder(BUILTIN), "none"
    made = Parts(*target, tokenizer, backend, choice, certificate)
    engine = Engine(EngineConfig(max_total_tokens=4096, **options), made)
    if engine.speculation is not None:
        engine.speculation.adaptive = False
    wish = SamplingParams(max_tokens=24, temperature=0, logprobs=1)
    hot = replace(wish, temperature=0.8, seed=3)
    penalised = replace(wish, temperature=1.0, top_p=0.9, seed=4, frequency_penalty=0.3)
    texts = ["def read(path):", "class Queue:\n    def __init__(self):", "import os\nimport "]
    wishes = zip(texts, (wish, hot, penalised), strict=True)
    jobs = [engine.add(tokenizer.encode(text), each) for text, each in wishes]
    while engine.busy:
        engine.step()
    engine.check()
    outputs = [job.output("") for job in jobs]
    counts = Speculated(*map(sum, zip(*(each.speculated for each in outputs), strict=True)))
    return [(each.token_ids, each.text, each.logprobs.tobytes()) for each in outputs], counts


def test_files_of_the_speed_table_were_held_out_of_model_and_head_training(script):
    sys.path.insert(0, str(ROOT / "tools/builtin"))
    from prepare import is_held_out

    files = json.loads(script.HELD_OUT.read_text())["files"]
    assert len(files) == len(set(files)) == 32 and all(map(is_held_out, files))


def test_the_training_script_and_the_engine_compute_the_same_head(script, target):
    """The script's formulas of target and head against the engine's, on one continuation: the same
    states, and the same logits along a chain."""
    torch.manual_seed(3)
    cpu, rows, steps = torch.device("cpu"), 20, 3
    plain = script.Target(BUILTIN, cpu)
    draft = eagle3.load(setup(target))
    head, kind = draft.kind.model, draft.kind
    prompts = torch.randint(2, 4096, (2, 12))
    batch = script.continued(plain, prompts, rows - 12, head.target_layers)
    own = script.Head(shape_of(script), head.token_ids, plain.embedding)
    stored = load_file(BUILTIN / "eagle3/model.safetensors")
    with torch.no_grad():
        for name, value in own.named.items():
            value.copy_(stored[f"{name.replace('/', '.')}.weight"])
    kinds = kinds_of(target.model, hidden_layers=head.target_layers)
    pages = [0 if g.layout is Layout.FRESH else 8 for g in group_specs(kinds.values())]
    driver = StepDriver(kinds, pages, reference.Backend())
    ids = batch.ids[0]
    with torch.no_grad():
        out = driver.step(kinds[GENERATE], [Share(driver.request(), ids)])
        states = torch.from_numpy(out.states)
        assert torch.allclose(states, batch.states[0].float(), rtol=0.02, atol=0.02)
        drafted = script.unrolled(own, replace(batch, states=states[None], ids=ids[None]), steps)
    last = 12 - 1  # the chain begins at the prompt's last row
    rig = Runner(kind.specs, [8], reference.Backend(), head.ops)
    table = PageTable(CacheGroups(kind.specs, [PagePool(8)]))
    given, begin = head.fuse(states[: last + 1]), 0
    for step in range(steps):
        new = ids[begin + 1 : last + 2 + step]
        table.reserve(begin + len(new))
        head.hidden[: len(new)] = given
        work = RequestWork(cached_len=begin, new_len=len(new), pages=table.views((0,)))
        with torch.no_grad():
            out = rig.run(build(kind.specs, [work]), new, kind)
            logits = head.logits(out.emitted)[0, head.token_ids]
        assert torch.allclose(logits, drafted[step][0, 0], rtol=1e-3, atol=1e-3)
        given, begin = out.next_hidden[-1:], begin + len(new)


def shape_of(script: ModuleType) -> Any:
    """Returns the shape of the shipped head."""
    config = json.loads((BUILTIN / "eagle3/config.json").read_text())
    return script.Shape(
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        inner=config["intermediate_size"],
        vocab=config["draft_vocab_size"],
        layers=tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
    )


def test_a_tiny_run_of_the_training_script_learns_and_its_head_loads(script, target, tmp_path):
    data, out, log = tmp_path / "prompts.npz", tmp_path / "head", tmp_path / "log.json"
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 4096, (8, 24)).astype(np.uint16)
    np.savez(data, prompts=prompts, held_out=prompts[:2])
    said = "--prompt-lens 16 --new 12 --held-new 10 --rows 8 --batch 4 --unroll 2 --steps 8"
    said += " --vocab 64 --inner 32 --heads 2 --every 2 --lr 0.01"
    paths = ["--data", str(data), "--out", str(out), "--log", str(log)]
    made = script.run(script.parser().parse_args(["train", *said.split(), *paths]))
    losses = [point["loss"] for point in made["curve"]]
    assert len(losses) == 4 and losses[-1] < losses[0], losses
    assert set(made["held_out"]) == {"greedy", "sampled"} and log.is_file()
    assert len(made["held_out"]["greedy"]["per_position"]) == 2
    head = eagle3.load(setup(target, out)).kind.model
    assert head.token_ids.shape == (64,) and head.target_layers == (2, 5, 7)
