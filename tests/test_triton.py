"""The GPU's kernels without a GPU: interpreted against float64 and against themselves, and compiled
for sm_90.

The cells run in processes of their own (`tests/triton_cells.py`), because Triton decides at import
whether it interprets. They use a small order, so that short requests cross many tiles and splits.
Marked `gpu`, the same cells run on a GPU, with the order of its class.
"""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep import order
from lockstep.kernels.triton import launch
from lockstep.kernels.triton.items import Rows, items
from lockstep.order import Splits, even
from lockstep.types import AttnSpec, GroupSpec, Layout

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only")


def cells(*options: str, interpret: bool = True) -> dict:
    environment = (
        os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | ({"TRITON_INTERPRET": "1"} if interpret else {})
    )
    command = [sys.executable, str(ROOT / "tests" / "triton_cells.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def judge(report: dict, tolerance: float) -> None:
    """Checks values and bits. Rounded outputs are off by half a unit of bfloat16 (2**-9) plus what
    P's rounding adds; bits must be equal."""
    for cell, found in report.items():
        for check, value in found.items():
            if isinstance(value, dict):
                assert value["out"] < tolerance and value["lse"] < 1e-5 and value["nan"] == 0, (
                    cell,
                    check,
                    value,
                )
            elif check != "seconds":
                assert value == 0, f"{cell}: {check}: {value} numbers differ"


def test_every_feature_has_the_values_of_the_definition():
    report = cells("--checks", "values")
    judge(report, 6e-3)
    assert len(report) >= 14


@pytest.mark.parametrize("names", ["dense", "window-all,cross", "latent,encoder"])
def test_bits_do_not_depend_on_batch_chunk_page_or_launch_shape(names):
    report = cells("--cells", names, "--checks", "bits")
    judge(report, 6e-3)
    assert "alone = batch" in report[names.split(",")[0]]


def test_rows_of_a_tree_have_the_bits_of_its_paths():
    report = cells("--cells", "dense,latent", "--checks", "tree")
    judge(report, 6e-3)
    assert report["dense"]["tree rows = their paths"] == 0


@pytest.mark.gpu
def test_on_a_gpu_every_feature_has_its_values_and_its_bits():
    judge(cells("--device", "cuda", interpret=False), 3e-3)
    judge(cells("--device", "cuda", "--checks", "cache", interpret=False), 0.0)


def test_keys_are_written_with_one_rounding_and_moved_together():
    judge(cells("--checks", "cache"), 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_more_keys_are_moved_in_a_step_than_one_program_can_hold(dtype):
    """70 items behind a prompt of pages of 64 used to be an error on a GPU: their forks relocate
    more than 4,096 rows in one step."""
    from lockstep.kernels.triton import cache  # imports Triton

    count = cache.MOVES + 251
    storages = [
        torch.arange(3 * count * n).remainder(251).to(torch.uint8).view(3 * count, n // 8, 8)
        for n in (8, 24)
    ]
    rows = torch.randperm(3 * count)
    sources, targets = rows[:count], rows[count // 2 :][:count]  # half of them are both
    want = [storage.clone() for storage in storages]
    for before, after in zip(storages, want, strict=True):
        after[targets] = before[sources]
    views = [storage.view(dtype) for storage in storages]
    cache.move(views, torch.stack((sources, targets), 1).int())
    assert all(torch.equal(a, b) for a, b in zip(storages, want, strict=True))


@pytest.mark.parametrize("splits", [even(512), Splits(8, 512, 1024), Splits(4, 512, 2048)])
def test_a_split_is_found_by_position_and_by_number(splits):
    p = np.arange(20000)
    nth = splits.index(p)
    assert (splits.begin(nth) <= p).all() and (p < splits.begin(nth + 1)).all()
    assert [splits.index(int(x)) for x in p[::997]] == nth[::997].tolist()


def test_the_order_of_a_device_class_depends_on_head_sizes_alone_and_tiles_divide_splits():
    for d_qk, d_v in ((8, 8), (64, 64), (128, 128), (192, 128), (256, 256), (576, 512)):
        found = order.attention_order(order.SM90, d_qk, d_v)
        assert found == order.attention_order(order.SM90, d_qk, d_v)
        splits = found.splits
        assert all(n % found.tile == 0 for n in (splits.len0, splits.len1))
        on_cpu = order.attention_order(order.CPU, d_qk, d_v)
        assert (on_cpu.tile, on_cpu.splits) == (order.tile_len(d_qk, d_v), even(order.SPLIT_LEN))


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 24, 48, 100, 128, 1000])
def test_the_division_by_the_page_size_is_exact_below_two_to_the_31(page_size):
    mul, shift = launch.divider(page_size)
    assert 2**31 <= mul < 2**32
    edges = [
        0,
        1,
        2**31 - 1,
        2**31 - 2,
        *(page_size * k + d for k in (1, 2, 1000, (2**31 - 1) // page_size) for d in (-1, 0, 1)),
    ]
    for p in [x for x in edges if 0 <= x < 2**31]:
        assert (2 * p * mul >> 32) >> shift == p // page_size


def test_head_sizes_are_split_into_two_powers_of_two_that_cover_them():
    for d in range(8, 577, 8):
        first, second = launch.pieces(d)
        assert first & (first - 1) == 0 and second & (second - 1) == 0
        assert first <= d or second == 0
        assert first + second >= d


def test_items_cover_every_row_and_every_visible_split_once():
    q_indptr = np.array([0, 1, 1, 40, 41], np.int32)
    hi = np.concatenate(([700], 1000 + np.arange(39), [5000])).astype(np.int32)
    lo = np.maximum(hi - 600, 0)
    rows = Rows(q_indptr, lo, hi, hi, np.zeros(4, np.int32))
    splits = Splits(2, 512, 1024)
    split_up = np.array([True, True, True, False])
    table, part_rows, _ = items(rows, np.arange(4), 4, 16, splits, split_up)
    seen, whole = {}, 0
    for item in table.tolist():
        _, begin, end, low, high, split, split_end, _, nth, parts, counter, _ = item
        assert splits.begin(split) < high and splits.begin(split_end) > low
        if begin == 40 * 4:  # the request that is not cut
            assert (split, split_end, parts) == (splits.index(low), splits.index(high - 1) + 1, 1)
            whole += 1
        else:
            assert split_end == split + 1
        seen.setdefault((begin, end, parts, counter), []).append(nth)
    assert whole == 1
    assert all(sorted(found) == list(range(key[2])) for key, found in seen.items())
    covered = sorted(row for begin, end, _, _ in seen for row in range(begin, end))
    assert covered == list(range(41 * 4))
    cut = [key for key in seen if key[0] < 40 * 4]
    assert part_rows == sum((end - begin) * parts for begin, end, parts, _ in cut)


def decodes(*keys: int) -> Rows:
    hi = np.array(keys, np.int32)
    indptr = np.arange(len(keys) + 1, dtype=np.int32)
    return Rows(indptr, np.zeros_like(hi), hi, hi, np.zeros_like(hi))


def test_a_request_is_split_over_programs_where_its_keys_exceed_a_multiprocessors_share():
    attn = AttnSpec(scale=0.1)
    dense = GroupSpec(Layout.DENSE, 32, 8, 128, 128, (attn,), kv_dtype="bfloat16")
    latent = GroupSpec(Layout.LATENT, 128, 1, 576, 512, (attn,), kv_dtype="bfloat16")
    cases = (
        (dense, (4096,), [True]),
        (dense, (8192,) * 8, [True] * 8),
        (dense, (2048,) * 64, [False] * 64),
        (dense, (2048,) * 64 + (32768,), [False] * 64 + [True]),
        (latent, (4096,) * 64, [False] * 64),
        (latent, (4096,) * 8, [True] * 8),
    )
    for spec, keys, want in cases:
        chosen = order.attention_order(order.SM90, spec.d_qk, spec.d_v)
        ((shape, requests, parts),) = launch.choose(spec, decodes(*keys), True, False, chosen)
        assert shape.kernel == ("latent" if spec is latent else "decode")
        assert len(requests) == len(keys) and parts.tolist() == want, keys


def test_requests_that_the_warp_specialised_kernels_do_not_support_use_the_plain_kernel():
    attn = AttnSpec(scale=0.1)
    base = GroupSpec(Layout.DENSE, 32, 8, 128, 128, (attn,), kv_dtype="bfloat16")
    others = (
        (replace(base, kv_dtype="float8_e4m3"), False),
        (replace(base, layers=(replace(attn, soft_cap=2.0),)), False),
        (replace(base, page_size=24), False),
        (replace(base, d_qk=80, d_v=80), False),
        (base, True),
    )
    for spec, tree in others:
        chosen = order.attention_order(order.SM90, spec.d_qk, spec.d_v)
        found = launch.choose(spec, decodes(4096, 100), True, tree, chosen)
        assert {shape.kernel for shape, _, _ in found} == {"plain"}


def test_keys_of_one_byte_are_never_given_blocks_below_64_rows():
    for d_qk, d_v, layout, kv_heads in ((128, 128, Layout.DENSE, 2), (576, 512, Layout.LATENT, 1)):
        spec = GroupSpec(
            layout, 8, kv_heads, d_qk, d_v, (AttnSpec(scale=0.1),), kv_dtype="float8_e4m3"
        )
        assert all(shape(spec).rows >= 64 for shape in (launch.few, launch.some, launch.many))


def test_a_handful_of_variants_compile_for_sm_90_without_spills(tmp_path):
    binaries = tmp_path / "cache"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(binaries)}
    command = [
        sys.executable,
        "-m",
        "lockstep.cli",
        "kernels",
        "--compile",
        "sm_90",
        "--json",
        str(tmp_path / "report.json"),
    ]
    names = ("attend 128/128 bfloat16 few", "write 8x128 float8", "move 256")
    names += ("decode 64/64 bfloat16 page 16", "decode 128/128 bfloat16 page 16")
    only = [word for name in names for word in ("--only", name)]
    done = subprocess.run(
        [*command, *only], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads((tmp_path / "report.json").read_text())
    assert {report["name"] for report in reports} >= {
        "attend 128/128 bfloat16 few part",
        "decode 64/64 bfloat16 page 16",
    }
    assert all(
        report["loop_spills"] == 0 and report["shared_bytes"] <= 227 * 1024 for report in reports
    )
    made = {path: path.stat().st_mtime_ns for path in binaries.rglob("*.cubin")}
    assert len(made) == len(reports)
    again = subprocess.run(
        [*command[:-1], "-", *only], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert again.returncode == 0, again.stdout + again.stderr
    by_name = operator.itemgetter("name")
    assert sorted(json.loads(again.stdout), key=by_name) == sorted(reports, key=by_name)
    assert {path: path.stat().st_mtime_ns for path in binaries.rglob("*.cubin")} == made


def test_there_are_no_more_variants_than_ci_can_compile():
    from lockstep.kernels.triton.variants import variants  # which needs Triton

    assert 40 <= len(variants()) <= 200
