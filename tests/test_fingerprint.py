"""The fingerprint contains whatever changes a bit: weights, the cache's dtype, and which package's
backend ran."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep import LLM
from lockstep.attention import select
from lockstep.config import EngineConfig
from lockstep.kernels.cpu.digest import BLOCK, LANES, digest
from lockstep.kernels.cpu.threads import limited
from lockstep.lab import tiny
from lockstep.llm.engine import BUILTIN, Engine, prepare
from lockstep.models import loader
from lockstep.types import KV_FORMATS, RuleError

OURS = "from lockstep.attention.cpu import Backend\n"


def test_each_dtype_of_the_cache_has_its_own_fingerprint():
    parts = tiny.parts(tiny.LLAMA, select.load("cpu"))
    made = {
        d: Engine(EngineConfig(kv_cache_dtype=d, max_total_tokens=64), parts) for d in KV_FORMATS
    }
    assert len({engine.fingerprint for engine in made.values()}) == len(KV_FORMATS)
    for dtype, engine in made.items():
        assert f";kv={dtype};" in engine.fingerprint


# ---- weights ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in model's folder, to be changed."""
    return Path(shutil.copytree(BUILTIN, tmp_path / "model"))


def digest_of(folder: Path) -> str:
    return loader.load(folder).info.weights


def test_the_fingerprint_names_the_weights():
    assert f";weights={digest_of(BUILTIN)};" in LLM(max_total_tokens=64).fingerprint


def test_the_same_weights_in_other_files_have_the_same_digest(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors, reverse=True)
    shards = {"b.safetensors": names[1::2], "a.safetensors": names[::2]}
    for file, some in shards.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    index = {"weight_map": {name: file for file, some in shards.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert digest_of(folder) == digest_of(BUILTIN)


@pytest.mark.parametrize(
    "change", ["one sign", "every sign", "two rows", "two tensors", "another dtype"]
)
def test_changed_weights_have_another_digest(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = [n for n in tensors if n.endswith("mlp.up_proj.weight")][:2]
    first, second = (tensors[n] for n in names)
    if change == "one sign":
        first[-1, -1] *= -1
    elif change == "every sign":
        first *= -1
    elif change == "two rows":
        tensors[names[0]] = first[[1, 0, *range(2, len(first))]].contiguous()
    elif change == "two tensors":
        tensors |= {names[0]: second, names[1]: first}
    else:
        tensors[names[0]] = first.float()
    save_file(tensors, path)
    assert digest_of(folder) != digest_of(BUILTIN)


@pytest.mark.parametrize(
    "length", [0, 1, 7, 8 * LANES, 8 * LANES * BLOCK + 13, 8 * LANES * BLOCK * 3]
)
def test_every_changed_byte_shows_in_a_digest(length):
    data = torch.randint(
        256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    want = digest(data)
    for at in {0, length // 2, length - 1} if length else ():
        data[at] ^= 128
        assert digest(data) != want, at
        data[at] ^= 128
    assert digest(data) == want
    with limited(1):
        assert digest(data) == want
    assert digest(torch.cat((data, torch.zeros(1, dtype=torch.uint8)))) != want


# ---- backends ----


def install(folder: Path, package: str, name: str, text: str = OURS) -> None:
    """Writes a package with one backend, as an installer would leave it."""
    info = folder / f"{package}-2.5.dist-info"
    info.mkdir(parents=True)
    (folder / f"{package}.py").write_text(text)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(f"[lockstep.backends]\n{name} = {package}:Backend\n")


@pytest.mark.parametrize(
    "ask", [select.names, lambda: select.load("cpu"), lambda: select.load("reference")]
)
def test_a_package_that_takes_our_backends_name_is_an_error_naming_both(tmp_path, monkeypatch, ask):
    install(tmp_path, "usurper", "cpu")
    monkeypatch.syspath_prepend(tmp_path)
    match = (
        r"only one backend is called cpu; got usurper:Backend of usurper-2.5, and lockstep's own "
        r"lockstep.attention.cpu"
    )
    with pytest.raises(RuleError, match=match):
        ask()
    with pytest.raises(RuleError, match=match):
        select.select(None, [], "cpu")


def test_two_packages_with_one_name_are_an_error_naming_both(tmp_path, monkeypatch):
    install(tmp_path / "a", "first", "fast")
    monkeypatch.syspath_prepend(tmp_path / "a")
    assert select.names()[-1] == "fast"
    install(tmp_path / "b", "second", "fast")
    monkeypatch.syspath_prepend(tmp_path / "b")
    with pytest.raises(
        RuleError,
        match=r"called fast; got second:Backend of second-2.5, and first:Backend of first-2.5",
    ):
        select.load("fast")


def test_a_package_found_twice_on_the_path_is_one_package(tmp_path, monkeypatch):
    for place in ("a", "b"):
        install(tmp_path / place, "first", "fast")
        monkeypatch.syspath_prepend(tmp_path / place)
    assert select.names()[-1] == "fast"


def test_the_fingerprint_names_the_distribution_of_a_third_party_backend(tmp_path, monkeypatch):
    install(tmp_path, "thirdparty", "fast")
    monkeypatch.syspath_prepend(tmp_path)
    theirs = LLM(max_total_tokens=64, attention_backend="fast").fingerprint
    assert theirs.startswith("order=canonical;backend=fast(thirdparty-2.5);gemm=")
    assert LLM(max_total_tokens=64).fingerprint.startswith("order=canonical;backend=cpu;gemm=")


# ---- layers ----


@pytest.mark.parametrize(
    ("windows", "wide"),
    [((0, 1, 1, 0), 9), ((0, 1, 1, 1), 9), ((0, 1, 0, 1), 9001)],
    ids=["in another order", "fewer with a window", "with a window too wide to be crossed"],
)
def test_the_same_weights_in_other_kinds_of_layers_have_another_fingerprint(windows, wide):
    """Only one layer of each kind is computed at start, so the fingerprint must name which layers
    are of which kind."""
    kinds = ("sliding_attention", "full_attention")

    def fingerprint(windows: tuple[int, ...], wide: int) -> str:
        changed = {
            "num_hidden_layers": 4,
            "layer_types": [kinds[i] for i in windows],
            "sliding_window": wide,
            "max_position_embeddings": 16384,
        }
        model = tiny.Tiny("qwen3", "", "qwen3", changed)
        config = EngineConfig(max_total_tokens=64)
        return Engine(config, prepare(tiny.loaded(model), None, config)).fingerprint

    known = 9 if wide == 9 else 9000
    assert fingerprint((0, 1, 0, 1), known) != fingerprint(windows, wide)
