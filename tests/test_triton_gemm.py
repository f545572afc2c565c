"""GEMM and row kernels of the GPU, without one: interpreted (values, bits), compiled for sm_90
(registers, spills), chosen at load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.types import RuleError

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
CELLS = (
    "gemm-values", "gemm-bits", "batched-gemm-bits", "rms-norm-values",
    "add-rms-norm-is-an-addition-and-a-norm", "norm-rows-are-independent", "layer-norm-values",
    "rope-values", "qk-norm-rope-is-a-norm-and-a-rotation", "gates", "bias-is-a-second-rounding",
    "routing", "router-values", "grouped-gemm-bits", "sampled-tokens-are-the-cpus",
    "log-probabilities-are-the-cpus", "a-row-of-nan-changes-no-other-row", "the-choice-of-a-gemm",
    "rows-outside-the-grid", "zero-rows", "linear-operations", "row-operations",
    "cache-operations", "an-engine-on-the-table", "the-table-is-complete",
    "rows-of-odd-length", "two-caches-at-one-address",
)  # fmt: skip
COMPILED = (
    "gemm 4096x12288 t16x32x256w4s6g8", "gemm 4096x4096 t64x32x128w4s8g8",
    "gemm 24576x4096 t128x128x64w8s4g8", "norm 4096 add", "qk_norm_rope 128 norm",
    "map silu gated", "route 8 of 256 bias norm pairs", "grouped_gemm 1536x2048 64", "noisy sample",
    "describe logprobs",
)  # fmt: skip


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """Runs all cells in one process that interprets. Returns cell → what was found."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "tests/triton_gemm_cells.py"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_cells_listed_in_this_file_are_those_that_ran(interpreted: dict[str, str]) -> None:
    assert set(interpreted) == set(CELLS)


@pytest.mark.parametrize("name", CELLS)
def test_a_kernel_has_its_values_and_its_bits(interpreted: dict[str, str], name: str) -> None:
    assert interpreted[name] == ""


@pytest.mark.parametrize("name", COMPILED)
def test_a_kernel_compiles_for_sm_90_without_spills(name: str) -> None:
    from lockstep.kernels.triton.variants import build, inspect, variants

    variant = variants()[name]
    report = inspect(variant)
    assert report["stack_bytes"] == 0
    assert report["shared_bytes"] <= 227 * 1024
    ptx = build(variant).asm["ptx"]
    assert "fma.rn.f64" not in ptx, "a product and a sum of float64 are two roundings"
    if "gemm" in name:
        wide = "t16x" not in name
        assert (report["wgmma"] > 0, report["mma"] > 0) == (wide, not wide)


def test_each_variant_has_its_own_name() -> None:
    from lockstep.kernels.triton.variants import record, variants

    found: dict[str, str] = {}
    heard = {"compile": {"constants": {}, "specialization_data": "one"}}
    kernel = SimpleNamespace(name="gemm_kernel", jit_function=SimpleNamespace(arg_names=[]))
    assert record(found, "16", kernel, **heard) and record(found, "16", kernel, **heard)
    heard["compile"]["specialization_data"] = "another"
    with pytest.raises(RuleError, match="each variant has its own name; got gemm 16"):
        record(found, "16", kernel, **heard)
    assert set(COMPILED) <= set(variants())


def test_every_tile_of_the_table_fits_into_shared_memory() -> None:
    from lockstep.kernels.triton.gemm_choice import GRID, MEASURED, tile_for

    shapes = [tuple(int(v) for v in name.split("x")) for name in MEASURED]
    assert shapes
    for n, k in [*shapes, (4096, 4096), (151936, 1024), (1024, 3072), (24576, 4096)]:
        for rows in GRID:
            tile = tile_for(n, k, rows)
            assert (tile.rows + tile.columns) * tile.depth * 2 * tile.stages <= 227 << 10
