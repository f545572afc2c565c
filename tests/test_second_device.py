"""A device of another package (tests/second_device), found through the entry points: engines run on
it with nothing of Lockstep edited or replaced."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.attention import select as backends
from lockstep.config import EngineConfig
from lockstep.kernels.select import DEVICES, select
from lockstep.lab import tiny
from lockstep.llm.engine import Engine, Parts, load
from lockstep.models import loader
from lockstep.sample.params import SamplingParams
from lockstep.types import Choice, RuleError

HERE = Path(__file__).parent / "second_device"
MODELS = [tiny.LLAMA, tiny.QWEN3, tiny.DEEPSEEK, tiny.GPT_OSS, tiny.GEMMA2]
PROMPTS = [tiny.words(n, n) for n in (3, 18, 9)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=3, logprobs=True, ignore_eos=True)


def register(folder: Path, package: str, **entries: str) -> None:
    """Writes a distribution that provides devices and a backend."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    devices = "\n".join(f"{name} = {value}" for name, value in entries.items())
    backend = "[lockstep.backends]\nrowwise = rowwise_attention:Backend\n"
    (info / "entry_points.txt").write_text(f"[lockstep.devices]\n{devices}\n{backend}")


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The package as an installer would leave it."""
    register(
        tmp_path / "site", "rowwise", rowwise="rowwise_ops:Ops", stale="rowwise_ops:StaleSlotOps"
    )
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    for name in ("rowwise_ops", "rowwise_attention"):
        sys.modules.pop(name, None)


def parts(model: tiny.Tiny, folder: Path, device: str = "rowwise") -> Parts:
    """Returns a tiny model on the device, without a certificate."""
    folder.mkdir(exist_ok=True)
    tiny.save(model, folder)
    loaded = loader.load(folder, EngineConfig(device=device))
    return Parts(
        loaded.model,
        loaded.info,
        None,
        backends.load("rowwise"),
        Choice("rowwise", "the test's"),
        "none",
    )


def answers(engine: Engine, prompts: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], bytes]]:
    """Returns tokens, and the bits of their log-probabilities, of requests that run together."""
    jobs = [engine.add(ids, PARAMS) for ids in prompts]
    while engine.busy:
        engine.step()
    outs = [job.output("") for job in jobs]
    return [(tuple(out.token_ids), np.array(out.logprobs, np.float32).tobytes()) for out in outs]


def test_a_draft_model_is_loaded_onto_the_device_of_its_target(outside, tmp_path):
    """It used to be loaded where the options say, which is "auto" if no device was named: on a
    machine with a GPU onto the GPU, although its target was on the CPU."""
    made = parts(tiny.LLAMA, tmp_path / "model")
    how = {"speculative_algorithm": "draft", "speculative_draft_model": str(tmp_path / "model")}
    sizes = {"max_total_tokens": 512, "page_size": 4}
    engine = Engine(EngineConfig.from_names({**sizes, **how}), made)
    assert engine.speculation is not None
    model = engine.speculation.draft.model.kind.model
    assert model.ops.device == made.model.ops.device and type(model.ops) is type(made.model.ops)
    plain = Engine(EngineConfig.from_names(sizes), made)
    assert answers(engine, PROMPTS) == answers(plain, PROMPTS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_an_engine_on_a_second_device_keeps_bits_in_any_batch_and_chunk(outside, tmp_path, model):
    """Together, in chunks, on small pages and alone: the same bits, and near the CPU's values."""
    made = parts(model, tmp_path / "model")
    together = Engine(EngineConfig(max_total_tokens=512, page_size=4), made)
    chunked = Engine(EngineConfig(max_total_tokens=512, chunked_prefill_size=5), made)
    alone = Engine(EngineConfig(max_total_tokens=512), made)
    want = [answers(alone, [ids])[0] for ids in PROMPTS]
    assert answers(together, PROMPTS) == want
    assert answers(chunked, PROMPTS[::-1]) == want[::-1]
    machine = ";device=rowwise(rowwise-1.0);machine=torch;sums=cpu-1;dtype=bfloat16;"
    assert machine in alone.fingerprint
    ours = loader.load(tmp_path / "model").model
    hidden = torch.randn(3, tiny.HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    near = made.model.logits(hidden) - ours.logits(hidden.float())
    assert near.abs().max() < 0.1, "bfloat16 of the same model"


def test_a_second_device_with_one_stale_slot_gives_other_answers(outside, tmp_path):
    made = parts(tiny.LLAMA, tmp_path / "model", "stale")
    stale = answers(Engine(EngineConfig(max_total_tokens=512), made), PROMPTS)
    sound = parts(tiny.LLAMA, tmp_path / "model")
    assert stale != answers(Engine(EngineConfig(max_total_tokens=512), sound), PROMPTS)


def test_a_second_device_is_certified_and_chosen_by_its_name(outside, tmp_path):
    tiny.save(replace(tiny.LLAMA, config={"num_hidden_layers": 1}), tmp_path)
    made = load(
        EngineConfig(
            model=str(tmp_path), device="rowwise", chunked_prefill_size=8, context_length=80
        )
    )
    assert made.info.device == ("rowwise", "computes in bfloat16, its default")
    assert made.attention.name == "rowwise", "no other backend takes bfloat16 rows there"


def test_an_unknown_device_and_an_unsupported_dtype_are_refused(outside):
    with pytest.raises(RuleError, match=r"is one of cpu, cuda, rowwise, stale; got 'rowwis'"):
        select("rowwis")
    with pytest.raises(RuleError, match="dtype on rowwise is one of bfloat16; got 'float32'"):
        select("rowwise", "float32")
    assert select("rowwise", "bfloat16")[1].reason == "computes in bfloat16, as requested"


def test_two_devices_of_one_name_are_an_error_naming_both(outside, tmp_path, monkeypatch):
    register(tmp_path / "other", "usurper", cpu="rowwise_ops:Ops")
    monkeypatch.syspath_prepend(tmp_path / "other")
    match = (
        r"only one device is called cpu; got rowwise_ops:Ops of usurper-1.0, and lockstep's own "
        r"lockstep.kernels.cpu.ops"
    )
    with pytest.raises(RuleError, match=match):
        DEVICES.names()
