"""The lab judges: it finds what is wrong, in the cells where it is wrong, also in backends that it
does not know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.attention import cpu
from lockstep.lab.cells import Cell, cells, run_cell
from lockstep.lab.features import FEATURES
from lockstep.lab.guard import BAND, Guarded
from lockstep.lab.oracle import answers, values
from lockstep.lab.recipes import RECIPES, Script, alone, chunked, leaf_uids, plain, write

OFF_BY_ONE = '''
from dataclasses import replace
from lockstep.attention.reference import Backend as Reference

class Backend(Reference):
    """A window that is one key too wide."""

    def bind(self, spec, bucket, views, variant):
        if spec.window is not None:
            spec = replace(spec, window=spec.window + 1)
        return super().bind(spec, bucket, views, variant)
'''


@pytest.fixture
def outsider(tmp_path: Path) -> dict[str, str]:
    """Returns an environment in which another package is on the path, with a backend as an entry
    point."""
    info = tmp_path / "offbyone-1.0.dist-info"
    info.mkdir()
    (tmp_path / "offbyone.py").write_text(OFF_BY_ONE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offbyone\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lockstep.backends]\noffbyone = offbyone:Backend\n")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    }


def test_a_third_party_backend_with_a_window_off_by_one_fails_window_cells_only(outsider):
    judged = []
    for feature in ("window", "window-sinks", "dense", "sinks"):
        command = [
            sys.executable,
            "-m",
            "lockstep.cli",
            "lab",
            "run",
            "--backend",
            "offbyone",
            "--feature",
            feature,
            "--json",
            "-",
        ]
        ran = subprocess.run(command, env=outsider, capture_output=True, text=True)
        assert ran.returncode == (1 if "window" in feature else 0), ran.stderr[-2000:]
        judged += json.loads(ran.stdout)["cells"]
    assert {c["backend"] for c in judged} == {"offbyone"}
    for cell in judged:
        broken = {f["name"] for f in cell["findings"] if not f["held"]}
        if cell["counters"].get("rows_beyond_window", 0):
            assert "value" in broken, cell["cell"]
        else:
            assert not broken, cell["cell"]
    assert sum(c["verdict"] == "failed" for c in judged) >= 30


def test_every_recipe_and_every_feature_has_cells_of_both_backends():
    pairs = Counter((c.recipe, c.feature) for c in cells(["cpu", "reference"]))
    assert sum(pairs.values()) >= 400
    assert set(pairs.values()) == {2}
    for recipe in RECIPES:
        assert any(r == recipe.name for r, _ in pairs), recipe.name
    for feature in FEATURES:
        assert any(f == feature.name for _, f in pairs), feature.name


@pytest.mark.parametrize(
    "cell",
    [
        "cpu/verify-tree/window-sinks",
        "cpu/encode-decode/cross",
        "cpu/embed/embed-latent",
        "cpu/embed/embed-20",
        "cpu/fork/latent-22",
        "reference/fork/fp8-kv",
        "reference/fork/latent-22",
    ],
)
def test_a_cell_passes_and_reports_its_findings_and_counters(cell):
    result = run_cell(Cell.parse(cell))
    assert result.verdict == "passed", result.reason
    assert {"value", "lse", "poison", "writes", "guards", "paths"} <= {
        f.name for f in result.findings
    }
    assert 0 < result.out_error
    assert 0 < result.tolerance_used < 1
    assert result.counters["rows"] > 0


def test_a_refusal_carries_the_backends_reason(monkeypatch):
    assert run_cell(Cell("cpu", "decode", "head-20")).verdict == "passed", (
        "a head size of 20 is padded, not refused"
    )
    monkeypatch.setattr(cpu.Backend, "caps", replace(cpu.CAPS, head_max=16))
    result = run_cell(Cell("cpu", "decode", "head-20"))
    assert (result.verdict, result.reason) == (
        "refused",
        "head size 20, stored as 24, is not a multiple of 8 up to 16",
    )


def test_a_cell_that_does_not_exist_is_a_clear_error():
    with pytest.raises(ValueError, match="backend/recipe/feature"):
        Cell.parse("cpu/decode")


def test_guard_bands_detect_a_write_outside_and_a_changed_input():
    guarded = Guarded()
    storage = guarded.storage((4, 1, 8), torch.float32, torch.device("cpu"))
    rows = guarded.rows(torch.zeros(3, 8))
    assert bool(storage.isnan().all())
    assert guarded.damage() == []
    storage.as_strided((1,), (1,), storage.storage_offset() - 1)[0] = 1.0
    assert guarded.damage() == ["the band around the storage was written"]
    rows = guarded.rows(torch.zeros(3, 8))
    rows[1, 1] = 5.0
    rows.as_strided((1,), (1,), rows.storage_offset() + 24 + BAND // 2)[0] = 1.0
    assert {"the input was changed", "the band around the input was written"} <= set(
        guarded.damage()
    )


def test_a_guarded_image_replaces_an_arena_and_stays_at_one_address():
    """A runner keeps views of its arena: an image at a second address would not be read."""
    guarded = Guarded()
    addresses = set()
    for number in (3, 4):
        guarded.host(20)[:] = number
        image = guarded.load(20)
        addresses.add(image.data_ptr())
        assert image.tolist() == [number] * 20 and guarded.damage() == []
    assert len(addresses) == 1
    image.as_strided((1,), (1,), image.storage_offset() + 20)[0] = 1
    assert guarded.damage() == ["the band around the plan image was written"]


def test_scripts_keep_their_tokens_when_chunked_or_reduced_to_one_request():
    script = write(next(r for r in RECIPES if r.name == "fork"), FEATURES[0])
    pieces = chunked(script, 7)
    everything = [u for s in script.steps for a in s for u in getattr(a, "uids", ())]
    assert sorted(u for s in pieces.steps for a in s for u in getattr(a, "uids", ())) == sorted(
        everything
    )
    assert max(len(a.uids) for s in pieces.steps for a in s if hasattr(a, "uids")) <= 7
    mine = alone(script, 3)
    assert {a.request for s in mine.steps for a in s} == set(script.lineage[3])
    assert {u for s in plain(script).steps for a in s for u in getattr(a, "uids", ())} == set(
        everything
    )


def test_the_answer_of_the_oracle_is_plain_softmax_attention():
    """Checks the oracle itself, against torch on one request."""
    script = Script()
    request = script.open()
    script.step(script.extend(request, 9))
    feature = FEATURES[0]
    rows = values(feature.groups(16), 9)
    answer = answers(feature, script, rows)[0][1]
    attn = feature.groups(16)[0].layers[1]
    q, k, v = (
        t.double().transpose(0, 1)
        for t in (rows[0][1].q, rows[0][1].k / attn.k_scale, rows[0][1].v / attn.v_scale)
    )
    k, v = (
        (t.float().double() * s).repeat_interleave(2, 0)
        for t, s in ((k, attn.k_scale), (v, attn.v_scale))
    )
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=attn.scale
    )
    assert list(leaf_uids(script)) == [8]
    assert torch.allclose(answer.out, want.transpose(0, 1), rtol=1e-6, atol=1e-7)
