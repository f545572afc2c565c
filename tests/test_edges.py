"""Numbers that no other test would miss: bounds from both sides, defaults, cache sizes, as literal
figures.

Each test stands for a mutant of `lockstep lab mutate` that survived.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_engine
import torch

from lockstep.attention.select import load, refusal
from lockstep.config import EngineConfig
from lockstep.kernels.cpu.ops import Ops
from lockstep.kv import pool as memory
from lockstep.kv.pool import Pool
from lockstep.kv.tables import peak_pages
from lockstep.llm.output import Output
from lockstep.run import certify, runner
from lockstep.run.certify import Edges
from lockstep.sample.formulas import counter
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import Row, RowBatch, settings
from lockstep.sched.request import RequestSpec
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
    ("stop", (["x"], ["x" * 256], list("abcdefghijklmnop")), ([""], ["x" * 257])),
    ("stop", (), (list("abcdefghijklmnopq"),)),
    ("stop_token_ids", ([0], [VOCAB - 1], range(1024)), ([-1], [VOCAB], range(1025))),
    ("logit_bias", ({0: -100}, {VOCAB - 1: 100}), ({-1: 1}, {VOCAB: 1}, {0: -100.01}, {0: 100.01})),
    ("logit_bias", (dict.fromkeys(range(1024), 1),), (dict.fromkeys(range(1025), 1),)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "inside", "outside"), BOUNDS, ids=[name for name, _, _ in BOUNDS])
def test_a_parameter_is_accepted_at_its_bound_and_refused_beyond_it(
    name: str, inside: tuple[Any, ...], outside: tuple[Any, ...]
):
    for value in inside:
        SamplingParams(**{name: value})
    for value in outside:
        with pytest.raises(RuleError):
            SamplingParams(**{name: value})


def test_min_tokens_is_bounded_by_max_tokens_alone():
    assert SamplingParams(min_tokens=2**24, max_tokens=2**24).min_tokens == 2**24
    assert SamplingParams(min_tokens=2**24, max_tokens=None).min_tokens == 2**24
    for bad in (-1, 2**24 + 1):
        with pytest.raises(RuleError, match="min_tokens is a whole number from 0 to 16777216"):
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
        "speculative": True,
        "sample_index": 0,
    }


def test_every_seed_is_used_unchanged_including_0():
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        for index, position in ((0, 0), (3, 7)):
            params = SamplingParams(seed=seed, sample_index=index, temperature=0.7, top_k=5)
            row = Row(params, position, 0, np.empty(0, np.int32))
            found = settings(RowBatch.of([row]), 61)
            assert found.ints.tolist() == [[5, *counter(seed, index, position)]]
            assert found.floats.tolist() == [[0.7, 1.0, -np.inf]]


def test_greedy_rows_have_settings_of_the_same_shape():
    rows = [Row(SamplingParams(temperature=0), 3, 0, np.empty(0, np.int32))] * 2
    found = settings(RowBatch.of(rows), 61)
    assert (found.floats.tolist(), found.ints.shape) == ([[0.0, 1.0, -np.inf]] * 2, (2, 5))
    assert not found.cuts and settings(RowBatch.of([]), 61).ints.shape == (0, 5)


def test_a_request_defaults_to_16_new_tokens():
    ask = RequestSpec((1, 2))
    assert (ask.max_new_tokens, ask.n, ask.priority, ask.max_keys) == (16, 1, 0, 17)
    assert RequestSpec((1, 2), 0, items=((3, 4, 5), (6,))).max_keys == 4, (
        "the last token is not computed"
    )
    assert RequestSpec((1, 2), 0, items=((3,),)).max_keys == 2


def group(**changes: Any) -> GroupSpec:
    """Returns a group of two layers of 2 heads of 8 columns: 256 B per slot."""
    fields = {"layout": Layout.DENSE, "heads": 2, "kv_heads": 2, "d_qk": 8, "d_v": 8}
    return GroupSpec(**{**fields, "layers": (AttnSpec(1.0),) * 2, **changes})


FULL, WINDOW = group(), group(window=32)
FRESH = group(layout=Layout.FRESH)
PAGE = 16 * 256  # bytes
CPU = torch.device("cpu")


def test_a_cache_is_sized_for_what_all_running_requests_can_fill(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 40)
    config = EngineConfig(max_running_requests=4, chunked_prefill_size=8)
    found, text = memory.cache_size((FULL, WINDOW, FRESH), config, 1001, CPU)
    # 4004 keys are 251 pages; with a window of 32 four requests hold at most (4 * (32 + 2 * 16 - 3)
    # + 8) // 16 = 15 pages; each pool has a null page in addition
    assert found == (252, 16, 0)
    assert text.splitlines()[0] == "cache for 4,004 tokens"
    assert text.splitlines()[-1] == f"total {(252 + 16) * PAGE:,} B"


def test_a_cache_takes_a_fraction_of_free_memory():
    assert all(0 < part < 1 for part in memory.FRACTIONS)


def test_the_outputs_of_graphs_reduce_the_memory_of_the_cache(monkeypatch):
    """Graphs with drafts for 256 requests keep gigabytes of logits, which no budget knew."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 100 * PAGE)
    config = EngineConfig(max_running_requests=4, mem_fraction_static=0.5)
    whole, _ = memory.cache_size((FULL,), config, 1000, CPU)
    less, text = memory.cache_size((FULL,), config, 1000, CPU, 30 * PAGE)
    assert 40 < whole[0] <= 50 and 15 < less[0] <= 20
    assert f"less {30 * PAGE:,} B for the outputs of graphs" in text.splitlines()[0]
    with pytest.raises(RuleError, match="the cache holds at least one page; got -"):
        memory.cache_size((FULL,), config, 1000, CPU, 60 * PAGE)


def test_a_window_never_needs_more_than_the_whole_cache():
    config = EngineConfig(max_running_requests=4, chunked_prefill_size=8, max_total_tokens=100)
    found, text = memory.cache_size((FULL, WINDOW), config, 1001, CPU)
    assert (text.splitlines()[0], found) == ("cache for 100 tokens", (8, 8))


@pytest.mark.parametrize(
    ("pages", "tokens"),
    # 400 keys, then by 15/16: 375, 351, 329, 308, 288, ...
    [(26, 400), (25, 375), (24, 351), (23, 351), (22, 329), (21, 308), (20, 288), (19, 288)],
)
def test_a_cache_shrinks_until_it_fits_its_fraction_of_free_memory(
    pages: int, tokens: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "free_bytes", lambda: 2 * pages * PAGE)
    config = EngineConfig(max_running_requests=4, mem_fraction_static=0.5)
    found, text = memory.cache_size((FULL,), config, 100, CPU)
    assert text.splitlines()[0] == f"cache for {tokens} tokens"
    assert found[0] <= pages


@pytest.mark.parametrize("page_size", [1, 16])
def test_memory_for_less_than_a_page_is_an_error(page_size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 256)
    config = EngineConfig(max_running_requests=4, mem_fraction_static=0.5, page_size=page_size)
    with pytest.raises(
        RuleError, match=r"the cache holds at least one page; got 128 B of memory for it"
    ):
        memory.cache_size((group(page_size=page_size),), config, 100, CPU)


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_a_window_request_holds_at_most_the_pages_its_keys_can_touch(size: int):
    for window, step in ((1, 1), (7, 1), (7, 16), (32, 5), (33, 512)):
        spec, seen = group(window=window, page_size=size), window - 1 + step
        touched = max((offset + seen - 1) // size + 1 for offset in range(size))
        assert peak_pages(spec, 10_000, step) == touched
        assert peak_pages(spec, seen, step) == -(-seen // size), "a short one holds all its keys"
        assert peak_pages(group(page_size=size), 10_000, step) == -(-10_000 // size)


def test_free_memory_is_at_most_what_the_machine_has():
    unit = os.sysconf("SC_PAGE_SIZE")
    assert 2**24 < memory.free_bytes() <= os.sysconf("SC_PHYS_PAGES") * unit
    assert memory.free_bytes() % unit == 0


def test_one_row_is_moved_like_many():
    pool = Pool(group(), 3, Ops(), lambda shape, dtype, device: torch.zeros(shape))
    for layer in pool.storages:
        for storage in layer:
            storage += torch.arange(len(storage))[:, None, None]
    for moves in ([[20, 40]], [[21, 41], [41, 42]]):
        want = [pool.keys(layer).v.clone() for layer in (0, 1)]
        for each in want:
            each[[target for _, target in moves]] = each[[source for source, _ in moves]]
        pool.move(torch.tensor(moves))
        assert all(torch.equal(pool.keys(layer).v, want[layer]) for layer in (0, 1))


@pytest.mark.parametrize("side", ["d_qk", "d_v"])
def test_the_cpu_backend_takes_heads_up_to_576(side: str):
    caps = load("cpu").caps
    assert refusal(caps, group(**{side: 576}), "cpu") is None
    assert "head size 584 is not" in (refusal(caps, group(**{side: 584}), "cpu") or "")


def test_id_0_is_a_token_like_any_other():
    engine = tiny_engine.engine(max_total_tokens=500)
    outputs = []
    for prompt in ((0,), (0, 5), (5, 0)):
        job = engine.add(
            prompt, SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=True, logprobs=True)
        )
        while engine.busy:
            engine.step()
        outputs.append(job.output(""))
    assert [len(o.token_ids) for o in outputs] == [2, 2, 2]
    scores = [np.asarray(o.prompt_logprobs) for o in outputs]
    assert [len(each) for each in scores] == [1, 2, 2]
    assert all(each[-1] < 0 for each in scores[1:]), "the score of a token, 0 among them"


def test_prompt_logprobs_true_returns_no_top_tokens():
    engine = tiny_engine.engine(max_total_tokens=500)
    for asked, best in ((True, 0), (0, 0), (2, 2)):
        job = engine.add(
            (3, 4, 5), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=asked)
        )
        while engine.busy:
            engine.step()
        tops = job.output("").prompt_top_logprobs or ()
        assert [len(top) for top in tops][1:] == [best] * (len(tops) - 1)


def answer(params: SamplingParams) -> Output:
    """Returns the answer of a tiny engine."""
    engine = tiny_engine.engine(max_total_tokens=500)
    job = engine.add((3, 4, 5), params)
    while engine.busy:
        engine.step()
    return job.output("")


def test_top_tokens_are_returned_only_if_logprobs_asks_for_them():
    for asked, best in ((None, None), (True, None), (0, None), (2, [2, 2, 2])):
        found = answer(SamplingParams(max_tokens=3, temperature=0, logprobs=asked))
        assert (found.logprobs is None) == (asked is None)
        assert (
            found.top_logprobs is None
            if best is None
            else list(map(len, found.top_logprobs)) == best
        )


def test_the_fields_of_an_output_are_those_of_its_first_completion():
    found = answer(SamplingParams(max_tokens=6, temperature=1.5, seed=3, n=3, logprobs=1))
    first, last = found.completions[0], found.completions[-1]
    assert first.token_ids != last.token_ids
    ended = dataclasses.replace(last, finish_reason="abort")
    other = dataclasses.replace(found, completions=(first, ended))
    assert (other.token_ids, other.text, other.finish_reason) == (
        first.token_ids,
        first.text,
        first.finish_reason,
    )
    assert (
        found.logprobs is first.logprobs
        and found.top_logprobs == first.top_logprobs != last.top_logprobs
    )


def test_an_engine_checks_the_plan_of_every_step(monkeypatch: pytest.MonkeyPatch):
    seen = []
    engine = tiny_engine.engine(max_total_tokens=500)  # certifies the model, with plans of its own
    monkeypatch.setattr(runner, "check", lambda plan, pages: seen.append(pages))
    engine.add((3, 4, 5), SamplingParams(max_tokens=3, temperature=0))
    while engine.busy:
        engine.step()
    assert [set(pages) for pages in seen] == [{33}] * 3, "500 tokens and the null page"


def test_a_scale_is_divided_out_in_a_cache_of_full_precision_too():
    spec = group(layers=(AttnSpec(1.0, k_scale=2.0, v_scale=4.0),))
    pool = Pool(spec, 2, Ops())
    k, v = torch.full((1, 2, 8), 6.0), torch.full((1, 2, 8), 6.0)
    pool.write(0, torch.tensor([17]), k, v)
    assert pool.keys(0).k[17].unique().tolist() == [3.0]
    assert pool.keys(0).v[17].unique().tolist() == [1.5]


@pytest.mark.parametrize(
    ("window", "limit", "runs"),
    [  # tiles of 64 and splits of 512 keys
        (None, 20_000, ((0, 5), (59, 69), (288, 307), (497, 527))),
        (None, 40, ((0, 5), (20, 40))),
        (100, 20_000, ((0, 5), (59, 69), (95, 105), (159, 166), (288, 290), (497, 527))),
        (8192, 20_000, ((0, 5), (59, 69), (288, 290), (497, 527), (8187, 8197), (8251, 8258))),
        (8193, 20_000, ((0, 5), (59, 69), (288, 307), (497, 527))),
    ],
)
def test_rows_are_certified_on_both_sides_of_a_tile_a_split_and_a_window(
    window: int | None, limit: int, runs: tuple[tuple[int, int], ...]
):
    assert Edges.of([group(window=window)], limit) == Edges(min(limit, 576), runs)


class Head:
    """Logits that differ in steps of exactly `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + (len(hidden) == self.rows)


@pytest.mark.parametrize(
    ("rows", "refused"), [*((n, True) for n in (2, 3, 7, 16, 33, 64, 100)), (101, False)]
)
def test_a_head_that_is_wrong_at_one_row_count_is_not_certified(rows: int, refused: bool):
    hidden = torch.arange(128.0).reshape(64, 2)
    with (
        pytest.raises(certify.NotCertified, match=f"{rows} rows of the head")
        if refused
        else nullcontext()
    ):
        config = EngineConfig(chunked_prefill_size=100)
        certify._head(SimpleNamespace(model=Head(rows), config=config), hidden, (1,))
