"""The engine's cells judge: their oracle is right, their environment is hostile, and a bug turns
them red."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep import cli
from lockstep.attention import select
from lockstep.lab import choice, pages, reverts
from lockstep.lab.cells import ENGINE, TABLES, Cell, cells, run_cell
from lockstep.lab.engine_harness import EngineHarness, stream_faults
from lockstep.lab.engine_recipes import GREEDY, PLAIN, THREE, words
from lockstep.lab.options import RunOptions
from lockstep.lab.recompute import StoryRequest
from lockstep.lab.tiny import LLAMA, MODELS, QWEN3, VOCAB, Letters
from lockstep.llm.output import Chunk

QUICK = RunOptions(quick=True)


@pytest.fixture
def rig() -> EngineHarness:
    return EngineHarness(QWEN3, select.load("cpu"))


@pytest.mark.parametrize(
    ("cell", "properties"),
    [
        ("cpu/engine-page/qwen3", {"page", "pages", "poison", "value", "paths"}),
        ("cpu/engine-score/gpt-oss", {"score", "pages", "poison", "value", "paths"}),
        ("cpu/engine-pad/bart", {"pad", "pages", "poison", "value", "paths"}),
        ("cpu/engine-error/qwen3", {"error", "pages", "poison", "value", "paths"}),
        ("cpu/engine-priority/gemma2", {"priority", "order", "pages", "value", "paths"}),
        ("cpu/engine-dtype/llama", {"dtype", "rounded", "paths"}),
        (
            "cpu/sample/llama",
            {"choice", "masked", "noise", "ties", "distribution", "devices", "paths"},
        ),
    ],
)
def test_a_cell_passes_and_reports_its_findings_and_counters(cell: str, properties: set[str]):
    result = run_cell(Cell.parse(cell), QUICK)
    assert result.verdict == "passed", result.reason
    assert properties <= {f.name for f in result.findings}
    assert 0 <= result.tolerance_used < 1 and result.counters


def test_names_belong_to_one_table_and_every_engine_recipe_and_model_has_cells():
    names = [
        [*(r.name for r in table.recipes), *(f.name for f in table.features)] for table in TABLES
    ]
    assert not set(names[0]) & set(names[1])
    asked = [c for c in cells(["cpu"]) if c.table is ENGINE]
    assert {c.recipe for c in asked} == {r.name for r in ENGINE.recipes} and {
        c.feature for c in asked
    } == {m.name for m in MODELS}


def test_a_backend_that_promises_no_bits_is_refused_and_the_matrix_says_why_once():
    result = run_cell(Cell.parse("reference/engine-hit/qwen3"))
    assert result.verdict == "refused" and "promises no bits" in result.reason
    page = pages.matrix_page(pages.promised(["reference"]))
    assert page.count(result.reason) == 1 and "| llama " in page


def test_a_revert_fails_its_cell_by_a_property_and_is_undone():
    cell = Cell.parse("cpu/engine-score/qwen3")
    for checks in (True, False):
        with reverts.swapped(reverts.load("lockstep-score-chunk")):
            found = run_cell(cell, replace(QUICK, checks=checks)).findings
            assert [each.name for each in found if not each.held] == ["score", "items"]
    assert run_cell(cell, QUICK).verdict == "passed"


def test_philox_gives_the_published_words():
    """The known answers published with Random123."""
    assert choice.philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert choice.philox((ones,) * 4, (ones,) * 2) == (
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )


def test_the_plain_sampler_cuts_tokens_and_breaks_ties_by_id():
    logits = np.array([1, 3, 3, 2], np.float32)
    assert choice.choose(logits, GREEDY, (), 0) == 1
    assert choice.kept(logits, replace(PLAIN, top_k=2)).tolist() == [False, True, True, False]
    assert choice.kept(logits, replace(PLAIN, top_p=0.1)).tolist() == [False, True, False, False]
    assert choice.kept(logits, replace(PLAIN, min_p=0.3)).tolist() == [False, True, True, True]


def test_poison_in_a_page_that_is_read_is_found(rig: EngineHarness):
    def spoil(engine, jobs, step):
        if step == 3:
            for pool in engine.runner.pools[:2]:
                for storage in (s for layer in pool.storages for s in layer):
                    storage[:] = torch.nan

    rig.play("batch", rig.engine(), [StoryRequest(words(20), PLAIN)], spoil)
    assert rig.faults["poison"] == ["request 0: a logit is NaN"] and rig.faults["batch"]


def test_a_lost_page_and_an_exception_are_found_and_earlier_tokens_are_compared(rig: EngineHarness):
    def lose(engine, jobs, step):
        if step == 2:
            engine.scheduler.pools[0].take(1)
        if step == 5:
            raise KeyError("on purpose")

    rig.play("batch", rig.engine(), [StoryRequest(words(20), PLAIN)], lose)
    assert "every hold has a holder" in rig.faults["pages"][0]
    assert rig.faults["raised"] == ["KeyError: 'on purpose'"] and not rig.faults["batch"]


def test_the_oracle_finds_a_wrong_token(rig: EngineHarness):
    def edit(engine, jobs, step):
        if step == 4:
            jobs[0].request.tokens[-1] = 1 + jobs[0].request.tokens[-1] % (VOCAB - 1)

    rig.play(
        "batch",
        rig.engine(),
        [StoryRequest(words(12), PLAIN), StoryRequest(words(9, 1), THREE)],
        edit,
    )
    assert (
        rig.faults["batch"]
        and rig.faults["batch"][0].startswith("request 0: tokens")
        and not rig.faults["pages"]
    )


def test_one_forward_suffices_if_the_hint_is_right_and_a_wrong_hint_changes_nothing(
    rig: EngineHarness,
):
    order, calls = StoryRequest(words(12), replace(PLAIN, logprobs=2)), list[int]()
    (want,) = rig.oracle.completions(order)
    inner = rig.oracle.hidden
    for said, forwards in ((want.token_ids, 1), (want.token_ids[:4], 6), ([3, 3, 3], None)):
        rig.oracle._known.clear()
        calls.clear()
        rig.oracle.hidden = lambda *args: calls.append(1) or inner(*args)
        (have,) = rig.oracle.completions(order, [tuple(said)])
        assert vars(have) == vars(want)
        assert forwards is None or len(calls) == forwards


def test_a_stream_that_differs_is_found(rig: EngineHarness):
    (job,) = rig.play("stream", rig.engine(), [StoryRequest(words(5), PLAIN)])
    assert not rig.faults["stream"]
    done = job.output("").completions[0]
    assert len(stream_faults(job, [Chunk(0, done.text + "x", done.token_ids[:-1], None)])) == 3


def test_the_alphabet_has_a_text_for_every_token():
    assert len(Letters.TOKENS) == VOCAB and len(set(Letters.TOKENS)) == VOCAB
    letters = Letters()
    for text in ("the end", "é€😀"):
        assert letters.decode(letters.encode(text, False)) == text
    assert letters.decode(letters.encode("😀", False)[:2]) == "�"


def test_lab_show_prints_steps_of_an_engine_and_its_findings(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["lab", "show", f"cpu/engine-score/{LLAMA.name}"]) == 0
    said = capsys.readouterr().out
    for word in (
        "engine 1: pages of 8, 512 rows a step",
        "request 0: 21 rows after 0 keys, 1 sampled",
        "write_slots",
        "nothing was wrong",
    ):
        assert word in said, word
