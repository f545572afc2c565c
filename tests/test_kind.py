"""Kinds of step: groups by number, hidden states beside the logits, kinds of two models
together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.attention.reference import Backend
from lockstep.kernels.cpu.ops import Ops
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.lab.tiny import BART, LLAMA, QWEN3, loaded
from lockstep.plan.build import RequestWork, build
from lockstep.run.kind import EMBED, ENCODE, GENERATE, StepKind, group_specs, kinds_of
from lockstep.run.runner import Runner, StepOutput
from lockstep.types import Layout, RuleError

IDS = torch.arange(3, 14)


def run(kinds: list[StepKind]) -> list[StepOutput]:
    """Runs the same tokens through every kind, on one page table of one runner. Returns the
    outputs."""
    specs = group_specs(kinds)
    pages = [0 if spec.layout is Layout.FRESH else 4 for spec in specs]
    runner = Runner(specs, pages, Backend(), Ops())
    table = PageTable(CacheGroups(specs, [PagePool(n) if n else None for n in pages]))
    table.reserve(len(IDS))
    out = []
    for kind in kinds:
        held = tuple(table.pages(g) for g in kind.groups)
        work = RequestWork(cached_len=0, new_len=len(IDS), pages=held)
        with torch.no_grad():
            out.append(runner.run(build(kind.specs, [work]), IDS, kind))
    return out


def test_a_model_has_the_kinds_of_step_that_it_has_layers_for():
    named = {tiny.name: list(kinds_of(loaded(tiny).model)) for tiny in (LLAMA, BART)}
    assert named == {"llama": [GENERATE, EMBED], "bart": [GENERATE, ENCODE]}
    model = loaded(LLAMA).model
    assert list(kinds_of(replace(model, head=None))) == [EMBED]
    kinds = kinds_of(loaded(BART).model, page_size=4)
    shared = set(kinds[GENERATE].groups) & set(kinds[ENCODE].groups)
    specs = group_specs(kinds.values())
    assert [specs[g].layout for g in shared] == [Layout.CROSS], "an encoder fills what is read"
    assert {spec.page_size for spec in kinds[GENERATE].specs} == {4}


def test_hidden_states_of_named_layers_are_returned_beside_the_logits():
    """The residual stream after a layer is what a model that ends with that layer has before its
    norm."""
    model = loaded(QWEN3).model
    layers = (0, 1)
    (plain,) = run([kinds_of(model)[GENERATE]])
    (out,) = run([kinds_of(model, hidden_layers=layers)[GENERATE]])
    assert torch.equal(out.rows, plain.rows) and plain.states is None
    assert torch.equal(out.emitted, out.rows[-1:])
    streams = torch.as_tensor(out.states).chunk(2, -1)
    norm = model.norm
    for layer, stream in zip(layers, streams, strict=True):
        short = replace(
            model,
            spec=replace(model.spec, blocks=model.spec.blocks[: layer + 1]),
            blocks=model.blocks[: layer + 1],
        )
        (want,) = run([kinds_of(short)[GENERATE]])
        assert torch.equal(norm(stream), want.rows)


def test_one_engine_can_run_kinds_of_step_of_two_models():
    """A draft model's groups are further columns of the same tables; neither model changes the
    other."""
    main = kinds_of(loaded(QWEN3).model)[GENERATE]
    draft = kinds_of(loaded(LLAMA).model, first_group=len(main.groups))[GENERATE]
    assert not set(main.groups) & set(draft.groups)
    alone = kinds_of(loaded(LLAMA).model)[GENERATE]
    first, second, again = run([main, draft, main])
    assert torch.equal(first.rows, again.rows)
    assert torch.equal(second.rows, run([alone])[0].rows)


def test_groups_that_leave_a_gap_or_lack_a_spec_are_refused():
    kind = kinds_of(loaded(LLAMA).model, first_group=1)[GENERATE]
    with pytest.raises(RuleError, match=r"without gaps; got \[1\]"):
        group_specs([kind])
    with pytest.raises(RuleError, match=r"one spec per group; got groups \(1,\) and 0 specs"):
        replace(kind, specs=())
