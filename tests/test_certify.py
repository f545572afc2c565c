"""The certificate is refused where a row's neighbours, position or kind of step can change its
bits; and the fingerprint states what computed an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep import order
from lockstep.attention import select
from lockstep.config import EngineConfig
from lockstep.kernels.cpu.ops import Ops
from lockstep.lab import reverts, tiny
from lockstep.llm import engine
from lockstep.llm.engine import prepare
from lockstep.models import loader
from lockstep.models.loader import Loaded
from lockstep.run import certify as certificates
from lockstep.run import runner
from lockstep.run.certify import (
    Edges,
    NotCertified,
    RowRange,
    consecutive,
    large,
    ranges,
    row_counts,
)
from lockstep.types import AttnSpec, GroupSpec, Layout

LONG = {"max_position_embeddings": 2048}  # room for a split and a window


@pytest.fixture(scope="module")
def builtin() -> Loaded:
    return loader.load(engine.BUILTIN)


def stretched(model: tiny.Tiny, **config: Any) -> Loaded:
    """Returns a tiny model whose context is longer than a split."""
    return tiny.loaded(replace(model, config={**model.config, **LONG, **config}))


def refusal(loaded: Loaded, **options: Any) -> str:
    """Returns why a certificate is refused, or ""."""
    try:
        prepare(loaded, None, EngineConfig(**options))
    except NotCertified as error:
        return error.got
    return ""


@pytest.mark.parametrize("model", tiny.MODELS, ids=lambda m: m.name)
def test_every_kind_of_cache_is_certified(model):
    assert refusal(stretched(model)) == ""


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float8_e4m3", "float16"])
def test_narrow_caches_are_certified(kv_cache_dtype):
    assert refusal(stretched(tiny.QWEN3), kv_cache_dtype=kv_cache_dtype, page_size=4) == ""


@pytest.mark.parametrize("model", [tiny.QWEN3, tiny.BART], ids=lambda m: m.name)
def test_padded_steps_are_certified(model, monkeypatch):
    loaded = stretched(model)
    padded = []

    def pad(plan: Any, bucket: Any) -> Any:
        padded.append(bucket.tokens - plan.real.tokens)
        return old(plan, bucket)

    old = runner.pad
    monkeypatch.setattr(runner, "pad", pad)
    assert refusal(loaded, bucket_sizes=(3, 50, 512)) == ""
    assert sum(map(bool, padded)) > 50


def test_a_window_beyond_the_first_split_is_certified_over_copied_keys():
    loaded = stretched(tiny.QWEN3, sliding_window=1000)
    edges = Edges.of(loaded.model.groups(), loaded.model.max_position)
    assert {995, 999, 1000, 1004, 1059, 1065} <= set(edges.positions)
    assert edges.whole == 576
    assert refusal(loaded) == ""


@pytest.mark.parametrize("name", ["sglang-10721", "vllm-51902"])
def test_a_bug_that_moves_splits_is_not_certified(builtin, name):
    """One key at position 0 does not show it: it takes a second tile."""
    with reverts.swapped(reverts.load(name)):
        assert refusal(builtin).startswith("a difference at ")
    assert refusal(builtin) == ""


def test_a_bug_in_tiles_that_a_row_does_not_see_is_not_certified():
    """It shows only if rows of one quad of the kernel are on both sides of a tile, so not with 4
    query heads per kv head."""
    loaded = stretched(tiny.LLAMA)
    with reverts.swapped(reverts.load("lockstep-rescale")):
        assert refusal(loaded).startswith("a difference at ")


def broken_from(rows: int) -> Ops:
    """Returns the CPU's table with a GEMM whose last bits are wrong from `rows` rows on, as if it
    added in another order."""

    right = Ops.linear

    class Broken(Ops):
        @staticmethod
        def linear(x: torch.Tensor, packed: Any) -> torch.Tensor:
            y = right(x, packed)
            return y if len(x) < rows else torch.nextafter(y, y + 1)

    return Broken()


@pytest.mark.parametrize("rows", [2, 33, 65, 449, 512])
def test_a_gemm_that_breaks_from_some_row_count_on_is_not_certified(monkeypatch, rows):
    monkeypatch.setattr(Ops, "linear", staticmethod(broken_from(rows).linear))
    said = refusal(tiny.loaded(replace(tiny.LLAMA, config=LONG)))
    assert said.startswith("a difference at ")


def test_a_gemm_that_breaks_beyond_the_largest_step_is_certified(monkeypatch):
    monkeypatch.setattr(Ops, "linear", staticmethod(broken_from(600).linear))
    assert refusal(stretched(tiny.LLAMA), chunked_prefill_size=512) == ""
    assert refusal(stretched(tiny.LLAMA), chunked_prefill_size=640).startswith(
        "a difference at 640 rows"
    )


def test_a_head_that_breaks_from_33_rows_on_is_not_certified(monkeypatch):
    loaded = stretched(tiny.LLAMA)
    head = replace(loaded.model.head, ops=broken_from(33))
    assert (
        refusal(Loaded(replace(loaded.model, head=head), loaded.info))
        == "a difference at 33 rows of the head and 1 threads"
    )


def test_an_encoder_that_breaks_from_33_rows_on_is_not_certified():
    loaded = stretched(tiny.BART)
    block = loaded.model.encoder.blocks[0]
    wrong = replace(block, mlp=replace(block.mlp, up=replace(block.mlp.up, ops=broken_from(33))))
    encoder = replace(loaded.model.encoder, blocks=(wrong, *loaded.model.encoder.blocks[1:]))
    assert "rows (sources)" in refusal(Loaded(replace(loaded.model, encoder=encoder), loaded.info))


class Misaligned:
    """The CPU backend, wrong in the last bits where a step has requests of several lengths and no
    drafts."""

    def __init__(self) -> None:
        self.sound = select.load("cpu")
        self.caps = self.sound.caps

    def derived_len(self, spec: Any, bucket: Any) -> int:
        return self.sound.derived_len(spec, bucket)

    def bind(self, *args: Any) -> Any:
        return self.sound.bind(*args)

    def lower(self, plan: Any, group: Any, views: Any) -> Any:
        self.mixed = (
            len(set(plan.new_lens.tolist())) > 1 and int((plan.start <= plan.positions).sum()) == 0
        )
        return self.sound.lower(plan, group, views)

    def attend(self, q: Any, keys: Any, handle: Any, spec: Any) -> Any:
        out, lse = self.sound.attend(q, keys, handle, spec)
        return (out + 2.0**-20 if self.mixed else out), lse


def test_a_backend_that_is_wrong_in_mixed_steps_only_is_not_certified():
    loaded = stretched(tiny.LLAMA)
    with pytest.raises(NotCertified, match=r"rows \((mixed|chunks|long chunks)\)"):
        certificates.certify(loaded.model, Misaligned(), loaded.info)


class ShortChunks(Misaligned):
    """The CPU backend, wrong in the last bits of requests with 33 to 63 rows: a tile that is half
    full."""

    def lower(self, plan: Any, group: Any, views: Any) -> Any:
        self.mixed = any(32 < n < 64 for n in plan.new_lens.tolist())
        return self.sound.lower(plan, group, views)


def test_a_backend_that_is_wrong_in_half_full_tiles_only_is_not_certified():
    loaded = stretched(tiny.LLAMA)
    with pytest.raises(NotCertified, match=r"rows \(long chunks\)"):
        certificates.certify(loaded.model, ShortChunks(), loaded.info)


class LongInBatch(Misaligned):
    """The CPU backend, wrong in the last bits where a whole request that crosses a split, at 512
    keys, has company."""

    def lower(self, plan: Any, group: Any, views: Any) -> Any:
        lens = plan.new_lens[: plan.real.requests].tolist()
        self.mixed = max(lens) > 512 and len(lens) > 1
        return self.sound.lower(plan, group, views)


@pytest.mark.parametrize(
    ("model", "what"),
    [(tiny.LLAMA, "embeddings of 4 lengths"), (tiny.BART, "sources of 4 lengths")],
    ids=["llama", "bart"],
)
def test_a_backend_that_is_wrong_in_a_long_request_of_a_batch_is_not_certified(model, what):
    loaded, config = stretched(model), EngineConfig(chunked_prefill_size=64)
    with pytest.raises(NotCertified, match=what):
        certificates.certify(loaded.model, LongInBatch(), loaded.info, config)


def test_a_backend_that_promises_no_bits_gets_the_certificate_none():
    loaded = stretched(tiny.LLAMA)
    assert certificates.certify(loaded.model, select.load("reference"), loaded.info) == "none"


@pytest.mark.parametrize("limit", [1, 7, 40, 64, 65, 160, 513])
def test_a_short_context_is_certified_up_to_its_last_position(limit):
    loaded = tiny.loaded(
        replace(tiny.QWEN3, config={**tiny.QWEN3.config, "max_position_embeddings": limit})
    )
    edges = Edges.of(loaded.model.groups(), limit)
    assert edges.length <= limit
    assert refusal(loaded) == ""


def test_the_certified_edges_are_those_of_the_device_class():
    def runs(d: int, device_class: str) -> tuple[tuple[int, int], ...]:
        spec = GroupSpec(Layout.DENSE, 2, 2, d, d, (AttnSpec(1.0),))
        return Edges.of([spec], 4096, device_class).runs

    for d, device_class, tile, split in (
        *((128, order.CPU, 64, 512), (128, order.SM90, 128, 512)),
        *((256, order.SM90, 32, 512), (576, order.SM90, 64, 1024), (576, order.CPU, 32, 512)),
    ):
        found = runs(d, device_class)
        assert any(a < tile < b for a, b in found), f"{d}, {device_class}: the tile's edge"
        assert any(a < split < b for a, b in found), f"{d}, {device_class}: the split's edge"
    assert order.device_class("cuda-sm_90") == order.SM90
    assert order.device_class("cpu-x86_64") == order.CPU


def test_the_row_counts_are_all_multiples_of_64_and_the_largest_step():
    assert row_counts(512) == [64, 128, 192, 256, 320, 384, 448, 512]
    assert row_counts(100) == [64, 100]
    assert row_counts(16) == []
    assert row_counts(5000) == [*range(64, 1025, 64), 2048, 4096, 5000]


@pytest.mark.parametrize("kind", certificates.KINDS)
def test_certified_steps_of_every_kind_cover_the_given_positions(kind):
    positions = [0, 1, 2, 59, 60, 61, 62, 63, 64, 500, 511, 512, 513, 0, 1]
    made = ranges(kind, positions)
    assert sum(p.rows for p in made) == len(positions)
    assert {"decode": made[3] == RowRange(59, 60), "chunks": made[1] == RowRange(59, 65)}.get(
        kind, True
    )
    assert any(p.branches == 2 for p in made) == (kind == "drafts")
    for nth, rows in enumerate(row_counts(512)):
        assert sum(p.rows for p in large(rows, nth, 576)) == rows
    assert consecutive(positions) == [(0, 3), (59, 65), (500, 501), (511, 514), (0, 2)]
    assert consecutive([1, 2, 3, 9]) == [(1, 4), (9, 10)]


def test_a_huge_chunked_prefill_size_does_not_delay_the_load():
    assert refusal(tiny.loaded(tiny.LLAMA), chunked_prefill_size=2**31 - 1) == ""
