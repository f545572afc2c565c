"""Numbers that nothing else would miss: bounds from both sides, defaults, sizes of a cache, in literal figures.

Each test stands for a mutant of `lockstep lab mutate` that lived.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from lockstep.config import EngineConfig
from lockstep.kv.pool import Pool
from lockstep.run import memory
from lockstep.sample.params import SamplingParams
from lockstep.types import AttnSpec, GroupSpec, Layout, RuleError

VOCAB = 2**20  # ids are below it

BOUNDS = [
    ("max_tokens", (1, 2**24), (0, 2**24 + 1)),
    ("temperature", (0, 1e-3, 2), (-1e-9, 0.9e-3, 2.000001)),
    ("top_p", (1e-9, 1), (0, 1.000001)),
    ("top_k", (-1, 0, VOCAB), (-2, VOCAB + 1)),
    ("min_p", (0, 1), (-1e-9, 1.000001)),
    ("seed", (-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63)),
    ("n", (1, 128), (0, 129)),
    ("logprobs", (0, 20), (-1, 21)),
    ("prompt_logprobs", (0, 20), (-1, 21)),
    ("presence_penalty", (-2, 2), (-2.000001, 2.000001)),
    ("frequency_penalty", (-2, 2), (-2.000001, 2.000001)),
    ("repetition_penalty", (0.01, 10), (0.0099, 10.000001)),
    ("sample_index", (0, 2**31 - 129), (-1, 2**31 - 128)),
    ("stop", (["x"], ["x" * 256], [str(i) for i in range(16)]), ([""], ["x" * 257], list("abcdefghijklmnopq"))),
    ("stop_token_ids", ([0], [VOCAB - 1], range(1024)), ([-1], [VOCAB], range(1025))),
    ("logit_bias", ({0: -100}, {VOCAB - 1: 100}, dict.fromkeys(range(1024), 1)), ({-1: 1}, {VOCAB: 1}, {0: -100.01}, {0: 100.01}, dict.fromkeys(range(1025), 1))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "inside", "outside"), BOUNDS, ids=[name for name, _, _ in BOUNDS])
def test_a_parameter_is_taken_at_its_bound_and_refused_one_beyond(name: str, inside: tuple[Any, ...], outside: tuple[Any, ...]):
    for value in inside:
        SamplingParams(**{name: value})
    for value in outside:
        with pytest.raises(RuleError):
            SamplingParams(**{name: value})


def test_min_tokens_is_bounded_by_max_tokens_alone():
    assert SamplingParams(min_tokens=2**24, max_tokens=2**24).min_tokens == 2**24
    assert SamplingParams(min_tokens=2**24, max_tokens=None).min_tokens == 2**24
    for bad in (-1, 2**24 + 1):
        with pytest.raises(RuleError, match="min_tokens is an integer from 0 to 16777216"):
            SamplingParams(min_tokens=bad, max_tokens=None)


def test_defaults_are_what_the_documentation_says():
    found = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    assert found == {
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "n": 1,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": (),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "min_tokens": 0,
        "sample_index": 0,
    }


def group(**changes: Any) -> GroupSpec:
    """Two layers of 2 heads of 8: 256 B a slot."""
    fields = {"layout": Layout.DENSE, "heads": 2, "kv_heads": 2, "d_qk": 8, "d_v": 8}
    return GroupSpec(**{**fields, "layers": (AttnSpec(1.0),) * 2, **changes})


FULL, WINDOW = group(), group(window=32)
FRESH = group(layout=Layout.FRESH)
PAGE = 16 * 256  # bytes


def test_a_cache_holds_what_all_running_requests_can_fill(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 40)
    config = EngineConfig(max_running_requests=4, chunked_prefill_size=8)
    found = memory.size((FULL, WINDOW, FRESH), config, 1001)
    assert found.total_tokens == 4004
    # 4004 keys are 251 pages; a window of 32 needs 4 * (32 + 2 * 16) + 8 = 264 keys, 17 pages; and each its null page
    assert found.pages == (252, 18, 0)
    assert found.text.splitlines()[0] == "cache for 4,004 tokens"
    assert found.text.splitlines()[-1] == f"total {(252 + 18) * PAGE:,} B"


def test_a_window_never_needs_more_than_the_whole_cache():
    config = EngineConfig(max_running_requests=4, chunked_prefill_size=8, max_total_tokens=100)
    found = memory.size((FULL, WINDOW), config, 1001)
    assert (found.total_tokens, found.pages) == (100, (8, 8))


@pytest.mark.parametrize(
    ("pages", "tokens"),
    # 400 keys, then by 15/16: 375, 351, 329, 308, 288, ...
    [(26, 400), (25, 375), (24, 351), (23, 351), (22, 329), (21, 308), (20, 288), (19, 288)],
)
def test_a_cache_shrinks_until_it_fits_its_part_of_free_memory(pages: int, tokens: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 2 * pages * PAGE)
    config = EngineConfig(max_running_requests=4, mem_fraction_static=0.5)
    found = memory.size((FULL,), config, 100)
    assert found.total_tokens == tokens
    assert found.pages[0] <= pages


@pytest.mark.parametrize("page_size", [1, 16])
def test_memory_for_less_than_a_page_is_an_error(page_size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 256)
    config = EngineConfig(max_running_requests=4, mem_fraction_static=0.5, page_size=page_size)
    with pytest.raises(RuleError, match=r"the cache holds at least one page; got 128 B of memory for it"):
        memory.size((group(page_size=page_size),), config, 100)


def test_free_memory_is_at_most_what_the_machine_has():
    unit = os.sysconf("SC_PAGE_SIZE")
    assert 2**24 < memory.free_bytes() <= os.sysconf("SC_PHYS_PAGES") * unit
    assert memory.free_bytes() % unit == 0


def test_a_scale_is_divided_out_in_a_cache_of_full_precision_too():
    spec = group(layers=(AttnSpec(1.0, k_scale=2.0, v_scale=4.0),))
    pool = Pool(spec, 2, torch.device("cpu"))
    k, v = torch.full((1, 2, 8), 6.0), torch.full((1, 2, 8), 6.0)
    pool.write(0, torch.tensor([17]), k, v)
    assert pool.keys(0).k[17].unique().tolist() == [3.0]
    assert pool.keys(0).v[17].unique().tolist() == [1.5]
