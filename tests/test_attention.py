"""Attention backends: which one is selected and why, and the conventions that other engines got
wrong, each shown by a spike that cannot be missed.

A spike is a key whose value is 1 in one column and whose score is far above all others, so the
output shows whether that key was seen.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from standalone import standalone
from torch import Tensor

from lockstep.attention import select
from lockstep.attention.base import INVARIANCES, Caps, score_constants, visible
from lockstep.kernels.cpu.ops import Ops
from lockstep.kv.pool import Pool
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.plan.build import RequestWork, build
from lockstep.plan.check import check
from lockstep.types import KV_FORMATS, AttnSpec, GroupSpec, Layout, Refused, RuleError

DENSE = GroupSpec(Layout.DENSE, 2, 1, 16, 16, (AttnSpec(0.25),), page_size=4)
BACKENDS = ("cpu", "reference")


def nans(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, device=device).to(dtype)


def attend(
    name: str, spec: GroupSpec, q: Tensor, k: Tensor, v: Tensor, cached: int = 0
) -> tuple[Tensor, Tensor]:
    """Attends for one request. One step writes `cached` keys, another computes the rows of `q`,
    which are the last ones. Returns (out, lse)."""
    backend, _ = select.select(name, [spec], "cpu")
    fresh = spec.layout is Layout.FRESH
    pages = None if fresh else PagePool(64)
    pool = None if fresh else Pool(spec, 64, Ops(), nans)
    table = PageTable(CacheGroups((spec,), (pages,)))
    done = 0
    for new in [n for n in (cached, len(k) - cached) if n]:
        table.reserve(done + new)
        plan = build((spec,), [RequestWork(done, new, (table.pages(0),))])
        check(plan, (0 if fresh else 64,))
        step = standalone(plan, backend, [pool])
        rows = slice(done, done + new)
        keys = step.stores[0].keys(0, k[rows].contiguous(), v[rows].contiguous())
        queries = q if new == len(q) else torch.zeros(new, spec.heads, spec.d_qk)
        queries[-len(q) :] = q
        out, lse = backend.attend(queries, keys, step.handles[0], spec.layers[0])
        done += new
    return out[-len(q) :], lse[-len(q) :]


def spikes(n: int, at: int, d: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Returns n keys, of which the one at `at` scores 30 above the others and has the value 1, and
    a query that finds it."""
    k, v, q = torch.zeros(n, 1, d), torch.zeros(n, 1, d), torch.zeros(1, 2, d)
    q[..., 0], k[at, :, 0], v[at] = 12.0, 10.0, 1.0
    return q, k, v


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cached", [0, 20])
@pytest.mark.parametrize(("back", "seen"), [(0, True), (6, True), (7, False), (8, False)])
def test_a_row_with_a_window_of_7_sees_its_own_key_and_6_before_it(backend, cached, back, seen):
    n = 25
    out, _ = attend(backend, replace(DENSE, window=7), *spikes(n, n - 1 - back), cached)
    assert out[0, 0, 0].item() == pytest.approx(1.0 if seen else 0.0, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 7])
def test_a_row_sums_every_key_of_its_visible_range_and_no_other(backend, window):
    n = 12
    k, v = torch.randn(n, 1, 16), torch.ones(n, 1, 16)
    out, lse = attend(backend, replace(DENSE, window=window), torch.zeros(n, 2, 16), k, v)
    seen = [min(row + 1, window or n) for row in range(n)]
    assert lse[:, 0].exp().tolist() == pytest.approx(seen, rel=1e-5)
    assert out.flatten().tolist() == pytest.approx([1.0] * out.numel(), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 4, 5])
def test_a_decoder_row_sees_every_key_of_its_encoder(backend, n):
    spec = replace(DENSE, layout=Layout.CROSS, causal=False)
    chosen, _ = select.select(backend, [spec], "cpu")
    pages, pool = PagePool(4), Pool(spec, 4, Ops())
    table = PageTable(CacheGroups((spec,), (pages,)))
    table.reserve(0, cross_len=n)
    slots = torch.from_numpy(table.slots(0, np.arange(n, dtype=np.int32)).astype(np.int64))
    pool.write(
        0, slots, torch.randn(n, 1, 16), torch.arange(float(n))[:, None, None].expand(n, 1, 16)
    )
    plan = build((spec,), [RequestWork(3, 1, (table.pages(0),), cross_len=n)])
    check(plan, (4,))
    (handle,) = standalone(plan, chosen, [pool]).handles
    out, lse = chosen.attend(torch.zeros(1, 2, 16), pool.keys(0), handle, spec.layers[0])
    assert lse[0].exp().tolist() == pytest.approx([n] * 2, rel=1e-5)
    assert out.flatten().tolist() == pytest.approx([(n - 1) / 2] * 32, abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_a_window_of_1_sees_only_its_own_key(backend):
    q, k, v = spikes(9, 8)
    out, lse = attend(backend, replace(DENSE, window=1), q, k, v)
    assert out[0, 0, 0].item() == 1.0
    assert lse[0, 0].item() == pytest.approx(30.0, rel=1e-6)  # one key: its score alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_causal_row_does_not_see_the_next_key_and_an_encoder_row_does(backend):
    q, k, v = spikes(9, 8)
    rows = torch.cat((q, torch.zeros_like(q)))  # the row before the spike, and the spike itself
    causal, _ = attend(backend, DENSE, rows, k, v)
    assert causal[0, 0, 0].item() == 0.0
    both, _ = attend(backend, replace(DENSE, layout=Layout.FRESH, causal=False), rows, k, v)
    assert both[0, 0, 0].item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_is_the_natural_log_of_the_denominator(backend):
    out, lse = attend(
        backend, DENSE, torch.zeros(1, 2, 16), torch.randn(70, 1, 16), torch.ones(70, 1, 16)
    )
    assert lse[0].tolist() == pytest.approx([math.log(70)] * 2, rel=1e-6)
    assert out[0].flatten().tolist() == pytest.approx([1.0] * 32, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [3, 64, 600])
def test_a_sink_joins_the_denominator_once_however_the_keys_are_split(backend, n):
    spec = replace(DENSE, layers=(AttnSpec(0.25, sinks=(1.0, -2.0)),))
    out, lse = attend(
        backend,
        replace(spec, page_size=16),
        torch.zeros(1, 2, 16),
        torch.randn(n, 1, 16),
        torch.ones(n, 1, 16),
    )
    for head, sink in enumerate((1.0, -2.0)):
        assert lse[0, head].item() == pytest.approx(math.log(n + math.exp(sink)), rel=1e-6)
        assert out[0, head, 0].item() == pytest.approx(n / (n + math.exp(sink)), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_soft_cap_bounds_the_score(backend):
    q, k, v = spikes(2, 0)
    _, lse = attend(
        backend, replace(DENSE, window=2, layers=(AttnSpec(0.25, soft_cap=5.0),)), q, k, v
    )
    capped = 5 * math.tanh(30 / 5)
    assert lse[0, 0].item() == pytest.approx(math.log(math.exp(capped) + 1), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", sorted(KV_FORMATS))
def test_scales_are_applied_once_and_new_keys_are_read_back_like_old_ones(backend, kv_dtype):
    spec = replace(DENSE, kv_dtype=kv_dtype, layers=(AttnSpec(0.25, k_scale=0.25, v_scale=8.0),))
    k, v = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
    k[1, :, 0], v[1] = 2.0, 24.0
    q = torch.zeros(1, 2, 16)
    q[..., 0] = 4.0
    for cached in (0, 1):
        out, lse = attend(backend, spec, q, k, v, cached)
        p = math.exp(2.0) / (math.exp(2.0) + 1)
        assert out[0, 0, 0].item() == pytest.approx(24 * p, rel=1e-6)
        assert lse[0, 0].item() == pytest.approx(math.log(math.exp(2.0) + 1), rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sinks", [None, (0.5, -0.5)])
def test_a_row_that_sees_nothing_is_zero(backend, sinks):
    """An encoder of length 0: out is 0, and lse is -inf or, with a sink, the sink."""
    spec = replace(DENSE, layout=Layout.CROSS, causal=False, layers=(AttnSpec(0.25, sinks=sinks),))
    chosen, _ = select.select(backend, [spec], "cpu")
    pages, pool = PagePool(4), Pool(spec, 4, Ops())
    table = PageTable(CacheGroups((spec,), (pages,)))
    plan = build((spec,), [RequestWork(3, 1, (table.pages(0),), cross_len=0)])
    check(plan, (4,))
    (handle,) = standalone(plan, chosen, [pool]).handles
    out, lse = chosen.attend(torch.randn(1, 2, 16), pool.keys(0), handle, spec.layers[0])
    assert torch.equal(out, torch.zeros(1, 2, 16))
    assert lse[0].tolist() == (list(sinks) if sinks else [-math.inf] * 2)


def test_an_unknown_backend_name_is_refused_with_a_suggestion():
    with pytest.raises(
        RuleError, match=r"a backend is one of cpu, .*reference; got 'cpuu'. Did you mean cpu\?$"
    ):
        select.load("cpuu")


def test_the_default_backend_is_the_first_that_supports_every_group_and_gives_the_reason():
    _, choice = select.select(None, [DENSE], "cpu")
    assert choice.name == "cpu"
    assert choice.reason.startswith("the first that can do all 1 groups on cpu")
    _, choice = select.select(None, [replace(DENSE, d_qk=20, d_v=20)], "cpu")
    assert choice.reason.startswith("the first")


def test_a_backend_that_promises_no_bits_is_chosen_only_by_name():
    wide = replace(DENSE, d_qk=600, d_v=600)
    with pytest.raises(
        Refused,
        match=r'600 is not a multiple of 8 up to 576.*Ask for attention_backend="reference" by '
        r"name",
    ):
        select.select(None, [wide], "cpu")
    backend, choice = select.select("reference", [wide], "cpu")
    assert (backend.caps.order, choice) == ("none", ("reference", "asked for by name"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"d_qk": 577}, "head size 577, stored as 584, is not a multiple of 8 up to 576"),
        ({"d_qk": 640, "d_v": 8}, "head size 640 is not"),
    ],
)
def test_a_backend_without_a_capability_that_the_model_needs_is_refused_before_anything_runs(
    change, match
):
    with pytest.raises(Refused, match=match):
        select.select("cpu", [replace(DENSE, **change)], "cpu")
    with pytest.raises(Refused, match="device cuda is not one of cpu"):
        select.select("cpu", [DENSE], "cuda")


def test_every_capability_that_a_group_needs_is_checked():
    able = Caps(
        devices=frozenset({"cpu"}),
        activation_dtypes=frozenset({"float32"}),
        kv_dtypes=frozenset({"float32"}),
        layouts=frozenset({Layout.DENSE}),
        head_multiple=8,
        head_max=64,
        page_sizes=frozenset({16}),
        window=True,
        non_causal=True,
        soft_cap=True,
        sinks=True,
        tails=True,
    )
    needs = {
        "window": (replace(DENSE, page_size=16, window=3), {"window": False}),
        "soft caps": (
            replace(DENSE, page_size=16, layers=(AttnSpec(1.0, soft_cap=2.0),)),
            {"soft_cap": False},
        ),
        "sinks": (
            replace(DENSE, page_size=16, layers=(AttnSpec(1.0, sinks=(0.0, 0.0)),)),
            {"sinks": False},
        ),
        "page size 4": (DENSE, {}),
        "kv_dtype bfloat16": (replace(DENSE, page_size=16, kv_dtype="bfloat16"), {}),
        "layout latent": (replace(DENSE, page_size=16, layout=Layout.LATENT), {}),
        "head size 72": (replace(DENSE, page_size=16, d_qk=72), {}),
        "not causal": (
            replace(DENSE, layout=Layout.FRESH, causal=False),
            {"layouts": frozenset(Layout), "non_causal": False},
        ),
        "tree rows": (replace(DENSE, page_size=16), {"tails": False}),
        "activations of float32": (
            replace(DENSE, page_size=16),
            {"activation_dtypes": frozenset({"bfloat16"})},
        ),
    }
    for word, (spec, lacks) in needs.items():
        why = select.refusal(replace(able, **lacks), spec, "cpu", tails=True)
        assert why is not None, word
        assert word in why
    assert select.refusal(able, replace(DENSE, page_size=16), "cpu", tails=True) is None


def test_a_capability_that_a_backend_does_not_state_counts_as_missing():
    nothing, whole = Caps(), replace(DENSE, page_size=16)
    assert (nothing.order, nothing.invariances) == ("none", frozenset())
    assert select.refusal(nothing, whole, "cpu") == "head size 16 is not a multiple of 1 up to 0"
    sized = replace(nothing, head_max=64)
    assert select.refusal(sized, whole, "cpu") == "device cpu is not one of none that it states"
    stated = {
        "devices": frozenset({"cpu"}),
        "activation_dtypes": frozenset({"float32"}),
        "kv_dtypes": frozenset({"float32"}),
    }
    able = replace(sized, layouts=frozenset({Layout.DENSE}), **stated)
    assert select.refusal(able, whole, "cpu") == "page size 16 is not supported"
    assert select.refusal(replace(able, page_sizes=frozenset({16})), whole, "cpu") is None
    flags = [field.name for field in fields(Caps) if field.type is bool]
    assert flags and not any(getattr(nothing, name) for name in flags)


@pytest.mark.parametrize(
    "q", [torch.zeros(1, 2, 8), torch.zeros(1, 3, 16), torch.zeros(1, 2, 16, dtype=torch.bfloat16)]
)
def test_queries_of_the_wrong_shape_or_type_are_refused(q):
    with pytest.raises(RuleError, match=r"queries are float32 of \[rows, 2, 16\]; got"):
        attend("cpu", DENSE, q, torch.zeros(1, 1, 16), torch.zeros(1, 1, 16))


def test_the_reference_backend_returns_outputs_in_the_dtype_of_its_activations():
    """The output used to be float32, which a model with narrower activations cannot take."""
    q, k, v = torch.randn(3, 2, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    exact, _ = attend("reference", DENSE, q.bfloat16().float(), k, v)
    out, lse = attend("reference", DENSE, q.bfloat16(), k, v)
    assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32
    assert torch.equal(out, exact.bfloat16())


def test_the_cpu_backend_promises_every_invariance_and_the_reference_none():
    assert select.load("cpu").caps.invariances == INVARIANCES
    assert select.load("reference").caps.invariances == frozenset()


def test_visible_ranges_are_the_window_clipped_at_position_0():
    spec = replace(DENSE, window=3)
    table = PageTable(CacheGroups((spec,), (PagePool(16),)))
    table.reserve(6)
    plan = build((spec,), [RequestWork(0, 6, (table.pages(0),))])
    lo, hi = visible(plan, plan.groups[0])
    assert lo.tolist() == [0, 0, 0, 1, 2, 3]
    assert hi.tolist() == [1, 2, 3, 4, 5, 6]
    assert lo.dtype == hi.dtype == np.int32


def test_each_score_constant_is_one_product_computed_on_the_host():
    pre, c = score_constants(AttnSpec(0.5, k_scale=3.0))
    assert (pre, c) == (0.0, 0.5 * 3.0 * math.log2(math.e))
    pre, c = score_constants(AttnSpec(0.5, k_scale=3.0, soft_cap=4.0))
    assert (pre, c) == (0.5 * 3.0 / 4.0, 4.0 * math.log2(math.e))
