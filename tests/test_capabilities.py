"""No bit depends on the width of the processor's vectors: models of every type under every
capability, each in a process of its own.

`ATEN_CPU_CAPABILITY` makes torch compute as on another processor, Numba's `haswell` makes our own
kernels do so. Capabilities that this processor lacks are skipped by name. The last test gives the
reason: what torch itself does to floating-point numbers of a row either moves them or rounds each
once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding
import pytest
from capabilities import MODELS, operators

from lockstep.models.loader import model_types

ROOT = Path(__file__).resolve().parent.parent
HASWELL = ("sse4.2", "avx", "avx2", "fma", "bmi", "bmi2", "popcnt", "lzcnt", "f16c", "movbe")
NEEDS: dict[str, tuple[str, ...]] = {  # setting → what the processor must have, by LLVM's names
    "default": (),
    "avx2": ("avx2", "fma"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"),
    "haswell": HASWELL,
}
FEW = (
    "gemma3_text-56",
    "gpt_oss-64",
    "deepseek_v3",
    "bert-24",
)  # haswell: compiling for it takes longer than answering
ASKED = {setting: FEW if setting == "haswell" else tuple(MODELS) for setting in NEEDS}
PAIRS = [
    (setting, name) for setting, names in ASKED.items() for name in names if setting != "default"
]
MOVES = {
    *(
        "_local_scalar_dense",
        "_unsafe_view",
        "alias",
        "as_strided",
        "cat",
        "clone",
        "constant_pad_nd",
        "copy_",
    ),
    *(
        "detach",
        "embedding",
        "empty",
        "empty_like",
        "expand",
        "fill_",
        "gather",
        "index",
        "index_select",
        "index_copy_",
        "index_put_",
    ),
    *(
        "lift_fresh",
        "masked_fill",
        "new_zeros",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "stack",
    ),
    *("unbind", "unsqueeze", "view", "where", "zeros_like"),
}
COMPARES = {"clamp", "gt", "sort"}
ROUNDS_ONCE = {"_to_copy", "add", "add_", "div", "mul", "sub"}


def lacking(setting: str) -> list[str]:
    """Returns the features that a setting needs and this processor lacks."""
    has = llvmlite.binding.get_host_cpu_features()
    return [feature for feature in NEEDS[setting] if not has.get(feature, False)]


def start(setting: str) -> subprocess.Popen[str]:
    """Starts a process that reports what the models answer under a setting."""
    settings = ("ATEN_CPU_CAPABILITY", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
    given = {k: v for k, v in os.environ.items() if k not in settings}
    given |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": setting}
    if setting == "haswell":
        features = ",".join(f"+{feature}" for feature in HASWELL)
        given |= {
            "NUMBA_CPU_NAME": "haswell",
            "NUMBA_CPU_FEATURES": features,
            "ATEN_CPU_CAPABILITY": "avx2",
        }
    command = [sys.executable, str(ROOT / "tests/capabilities.py"), *ASKED[setting]]
    return subprocess.Popen(
        command, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """Returns setting → what its process reported."""
    found = {}
    for setting, process in {
        setting: start(setting) for setting in NEEDS if not lacking(setting)
    }.items():
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0, f"{setting}: {errors[-2000:]}"
        found[setting] = json.loads(out)
    return found


def test_the_models_cover_every_type_and_the_sizes_that_once_differed():
    assert sorted({config["model_type"] for config in MODELS.values()}) == model_types()
    assert {"gemma3_text-56", "qwen3-128", "llama-112", "llama-20"} <= set(MODELS)


@pytest.mark.parametrize("setting", list(NEEDS))
def test_a_worker_process_uses_the_instructions_it_was_given(setting: str, reports: dict[str, Any]):
    if lacking(setting):
        pytest.skip(f"{setting}: this processor has no {', '.join(lacking(setting))}")
    report = reports[setting]
    assert report["torch"] == ("AVX2" if setting == "haswell" else setting.upper())
    assert (report["numba"][1] == "haswell") == (setting == "haswell")
    assert not (setting == "haswell" and "avx512" in report["numba"][2])


@pytest.mark.parametrize(("setting", "name"), PAIRS)
def test_bits_and_fingerprints_do_not_depend_on_vector_instructions(
    setting: str, name: str, reports: dict[str, Any]
):
    if lacking(setting):
        pytest.skip(f"{setting}: this processor has no {', '.join(lacking(setting))}")
    want, have = reports["default"]["models"][name], reports[setting]["models"][name]
    assert want["fingerprint"].startswith("order=canonical;"), "bits are promised"
    assert have["bits"] == want["bits"]
    assert have["fingerprint"] == want["fingerprint"]
    assert len(set(want["bits"].values())) == len(want["bits"]), (
        "answers to different questions differ"
    )


@pytest.mark.parametrize("name", list(MODELS))
def test_torch_only_moves_or_compares_the_numbers_of_a_row_or_rounds_each_once(name: str):
    """Sums, means, matrix products, powers and exponentials of torch have vector bodies and scalar
    tails, and orders of their own."""
    found = {operator.removeprefix("aten.") for operator in operators(name)}
    assert found <= MOVES | COMPARES | ROUNDS_ONCE
    assert found & MOVES, "the operators were seen"
