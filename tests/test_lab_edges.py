"""The lab at edges: infinities, padding, checks that notice nothing, buffers that are exactly full;
and the option that names buckets."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from lockstep.attention import select
from lockstep.cli import make_parser
from lockstep.config import EngineConfig
from lockstep.kernels.cpu import sample
from lockstep.lab import reverts, spoilt
from lockstep.lab.attention_harness import AttentionHarness, Setting
from lockstep.lab.cells import Cell
from lockstep.lab.engine_harness import EngineHarness
from lockstep.lab.features import FEATURES
from lockstep.lab.oracle import Rows, overflowed, values, weighted
from lockstep.lab.recipes import RECIPES, Compute, write
from lockstep.lab.tiny import LLAMA
from lockstep.plan.bucket import Bucket, Buckets, pad
from lockstep.plan.build import RequestWork, build
from lockstep.types import AttnSpec, GroupSpec, Layout, RuleError

SAMPLING = "lockstep.kernels.cpu.sample:compiled"


def draft_world() -> tuple[AttentionHarness, list[Compute]]:
    """Returns a harness in the middle of the drafts of three requests, and what they compute
    next."""
    feature = FEATURES[0]
    script = write(next(r for r in RECIPES if r.name == "draft-decode"), feature)
    rows = values(feature.groups(16), len(script.parents))
    world = AttentionHarness(feature, script, rows, select.load("cpu"), Setting())
    for step in script.steps[:3]:
        world._play(step)
    return world, [a for a in script.steps[3] if isinstance(a, Compute)]


def test_an_infinity_counts_for_rows_that_see_its_key_and_for_no_other():
    weights = torch.tensor([[[1.0, 0.0], [0.25, 0.75]]], dtype=torch.float64)
    v = torch.tensor([[[1.0, 2.0]], [[torch.inf, 4.0]]], dtype=torch.float64)
    out, mass = weighted(weights, v)
    assert out.tolist() == [[[1.0, 2.0]], [[torch.inf, 3.5]]] and bool(mass.isfinite().all())


def test_values_overflow_in_one_sign_per_column_and_only_where_asked():
    rows = [[Rows(torch.zeros(3, 2, 32), torch.zeros(3, 2, 32), torch.ones(3, 2, 32))]]
    spoilt_v = overflowed(rows, [1])[0][0].v
    assert spoilt_v.isinf().sum(2).tolist() == [[0, 0], [2, 2], [0, 0]] and bool(
        rows[0][0].v.isfinite().all()
    )
    assert overflowed(rows, []) is rows


def test_pad_rows_are_compared_with_the_pad_request_alone():
    world, computes = draft_world()
    plan = world.plan(computes, (0,))
    padded = pad(plan, Buckets((4, 16)).fit(plan))
    out, lse = (torch.zeros(padded.bucket.tokens, *t.shape[1:]) for t in world.pad_request(0, 3)[0])
    real, lens = plan.real.tokens, padded.new_lens[plan.real.requests :].tolist()
    assert lens == [3]
    out[real:], lse[real:] = world.pad_request(0, 3)[0]
    assert world.differing_pads(0, 0, padded, (out, lse)) == []
    out[real + 1, 0, 0] += 1e-6
    assert world.differing_pads(0, 0, padded, (out, lse)) == [3]


def test_a_draft_step_that_shares_a_page_is_refused_and_a_check_that_misses_it_is_found():
    world, computes = draft_world()
    plan = world.plan(computes, (0,))
    pages = (world.pools[0].num_pages,)
    assert (
        len(list(spoilt.variants(plan))) >= 15
        and len(list(spoilt.shared_pages(plan, plan.groups[0]))) == 3
    )
    assert spoilt.unnoticed(plan, pages) == []
    with reverts.swapped(reverts.load("lockstep-draft-claim")):
        assert any(
            "plan.check accepted it" in fault or "shares a page" in fault
            for fault in spoilt.unnoticed(plan, pages)
        )


def test_a_bucket_takes_its_exact_limit_and_refuses_one_more_with_both_numbers():
    spec = GroupSpec(Layout.FRESH, 1, 1, 8, 8, (AttnSpec(scale=1.0),))

    def bucket(*lengths: int) -> Bucket:
        works = [RequestWork(cached_len=0, new_len=n, pages=(None,)) for n in lengths]
        return Buckets((2, 5, 9)).fit(build([spec], works))

    assert [bucket(*(1,) * n).requests for n in (4, 5, 6, 9)] == [5, 5, 9, 9]
    assert [bucket(n - 1, 1).tokens for n in (4, 5, 6, 9)] == [5, 5, 9, 9]
    with pytest.raises(RuleError, match="a step has at most 9 requests; got 10"):
        bucket(*(1,) * 10)
    with pytest.raises(RuleError, match="a step has at most 9 tokens; got 10"):
        bucket(9, 1)


def test_a_request_that_is_lost_after_an_error_is_found(monkeypatch: pytest.MonkeyPatch):
    rig = EngineHarness(LLAMA, select.load("cpu"))
    monkeypatch.setattr(
        "lockstep.lab.engine_harness.STEPS", 3
    )  # stands for an engine that stops making progress
    Cell.parse("cpu/engine-error/llama").pair()[0].play(rig, quick=True)
    assert any("never ended" in fault or "were accepted" in fault for fault in rig.faults["error"])


@pytest.mark.parametrize("name", [n for n in reverts.names() if reverts.load(n).target == SAMPLING])
def test_a_replaced_function_of_the_sampling_kernel_has_the_same_parameters(name: str):
    module = importlib.import_module(f"{reverts.__name__}.{name.replace('-', '_')}")
    own = {
        k: f
        for k, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and k != "revert"
    }
    assert own
    for key, text in own.items():
        assert list(inspect.signature(text).parameters) == list(
            inspect.signature(getattr(sample, key)).parameters
        ), key


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            (4, 2),
            "bucket_sizes is a rising list of whole numbers from 1 to 2147483647; got (4, 2).",
        ),
        ((), "bucket_sizes is a rising list of whole numbers from 1 to 2147483647; got ()."),
        (
            (1, 2.0),
            "bucket_sizes is a rising list of whole numbers from 1 to 2147483647; got (1, 2.0).",
        ),
        ("12", "bucket_sizes is a rising list of whole numbers from 1 to 2147483647; got '12'."),
        ((1, 100), "the largest of bucket_sizes holds a step of 512; got 100."),
    ],
)
def test_buckets_that_cannot_be_used_are_refused_in_one_line(sizes: object, said: str):
    with pytest.raises(RuleError) as error:
        EngineConfig(bucket_sizes=sizes)  # type: ignore[arg-type]
    assert str(error.value).startswith(said)


def test_bucket_sizes_can_be_given_on_the_command_line():
    args = make_parser().parse_args(["generate", "x", "--bucket-sizes", "1,8,512"])
    assert EngineConfig(bucket_sizes=args.bucket_sizes).bucket_sizes == (1, 8, 512)
    assert EngineConfig.from_names({"bucket_sizes": [512]}).bucket_sizes == (512,)
