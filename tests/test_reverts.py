"""Every historical bug can be put back: its case file is complete, its target exists, and it is
always removed again.

`lockstep lab reverts` measures that the lab kills each of them; here one cheap revert represents
them all.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace

import pytest

from lockstep.kernels.cpu import attend
from lockstep.lab import reverts
from lockstep.lab.cells import Cell, run_cell
from lockstep.lab.options import RunOptions
from lockstep.plan import build
from lockstep.run import runner
from lockstep.types import RuleError

SEEDS = ("sglang-24097", "sglang-26412", "sglang-26512", "sglang-26513", "sglang-27360")
KERNEL = "lockstep.attention.cpu:kernel"
QUICK = RunOptions(quick=True)


def made() -> reverts.Revert:
    """Returns a revert of this test's own, which changes nothing."""
    blank = reverts.load("sglang-7239")
    return replace(
        blank, name="a-test", make=lambda old: lambda parents, new_len: old(parents, new_len)
    )


def test_at_least_91_reverts_exist_the_five_seeds_among_them():
    real = [name for name in reverts.names() if not reverts.load(name).equivalent]
    assert len(real) >= 91 and set(SEEDS) <= set(real)


@pytest.mark.parametrize("name", reverts.names())
def test_a_case_file_is_complete_and_its_revert_can_be_applied_and_undone(name):
    revert = reverts.load(name)
    assert revert.source and set(revert.story) == set(reverts.SECTIONS)
    lines = sum(len(text.splitlines()) for text in revert.story.values())
    assert lines >= (10 if name in SEEDS else 6), f"{name}: {lines} lines of story"
    _, _, old = reverts.resolve(revert.target)
    assert list(inspect.signature(revert.make(old)).parameters) == list(
        inspect.signature(old).parameters
    )
    with reverts.swapped(revert):
        assert reverts.resolve(revert.target)[2] is not old
    assert reverts.resolve(revert.target)[2] is old


@pytest.mark.parametrize("name", reverts.names())
def test_a_revert_names_applicable_cells_and_existing_related_cases(name):
    revert = reverts.load(name)
    replays = all(cell.startswith("engine-replay/") for cell in revert.cells)
    assert 1 <= len(revert.cells) <= 3
    assert replays or not revert.crash, "only a stale launch may read outside of the cache"
    for cell in revert.cells:
        recipe, feature = Cell.parse(f"cpu/{cell}").pair()
        assert recipe.applies_to(feature), f"{cell}: {recipe.name} does not apply to {feature.name}"
    assert revert.related and name not in revert.related
    assert set(revert.related) <= set(reverts.names()), set(revert.related) - set(reverts.names())


@pytest.mark.parametrize("name", [n for n in reverts.names() if reverts.load(n).target == KERNEL])
def test_a_replaced_function_of_the_attention_kernel_has_the_same_parameters(name):
    module = importlib.import_module(f"{reverts.__name__}.{name.replace('-', '_')}")
    own = {
        k: f
        for k, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and k != "revert"
    }
    texts = {**vars(attend.elementary), **vars(attend)}
    assert own and set(own) <= set(texts)
    for key, text in own.items():
        assert list(inspect.signature(text).parameters) == list(
            inspect.signature(texts[key]).parameters
        ), key


def test_a_revert_is_applied_in_every_module_that_imported_the_function():
    right = build.paths
    with reverts.swapped(made()):
        assert build.paths is not right and runner.paths is build.paths
    assert build.paths is right and runner.paths is right


def test_a_revert_is_undone_after_an_exception():
    right = build.paths
    with (
        pytest.raises(RuleError, match="at least one and at most all nodes"),
        reverts.swapped(made()),
    ):
        build.paths((), 1)
    assert build.paths is right and runner.paths is right


@pytest.mark.parametrize(
    "target",
    ["lockstep.plan.build:gone", "lockstep.kv.pool:Pool.gone", "lockstep.kv.pool:Gone.move"],
)
def test_a_revert_whose_target_no_longer_exists_is_an_error(target):
    with (
        pytest.raises(RuleError, match="a revert's target exists"),
        reverts.swapped(replace(made(), target=target)),
    ):
        pass


def test_a_target_whose_parameters_changed_is_an_error_and_nothing_is_swapped():
    right = build.paths
    changed = replace(made(), make=lambda old: lambda parents, count: old(parents, count))
    with pytest.raises(RuleError, match="Adapt the revert"), reverts.swapped(changed):
        pass
    assert build.paths is right


def test_a_case_file_without_a_section_is_an_error():
    whole = "A title.\n\n" + "\n".join(f"{section}:\nText." for section in reverts.SECTIONS)
    assert reverts.parse("x", whole)[0] == "A title."
    for section in reverts.SECTIONS:
        with pytest.raises(RuleError, match=section):
            reverts.parse("x", whole.replace(f"{section}:\nText.", ""))


def test_a_cell_passes_without_the_bug_fails_with_it_and_passes_again():
    cell = Cell.parse("cpu/embed/embed-latent")
    assert run_cell(cell, QUICK).verdict == "passed"
    for checks in (True, False):
        with reverts.swapped(reverts.load("sglang-24097")):
            found = run_cell(cell, replace(QUICK, checks=checks)).findings
            assert "poison" in [each.name for each in found if not each.held]
    assert run_cell(cell, QUICK).verdict == "passed"
