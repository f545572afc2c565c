"""`lockstep bench attention --device cpu`: the CPU backend against torch's SDPA in the same run,
over gathered pages and over contiguous K/V; fp32, pages of 16 in shuffled order."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lockstep.attention import select
from lockstep.bench.results import Bench, called, note, run_on_card
from lockstep.kernels.cpu.ops import Ops
from lockstep.kv.pool import Pool
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.plan.build import RequestWork, build
from lockstep.plan.check import check
from lockstep.plan.step import StepPlan
from lockstep.run.step import handles_of, layout_of, lower
from lockstep.types import AttnSpec, GroupSpec, Layout

HEADS = ((8, 2), (32, 8))
HEAD_SIZES = (64, 128)
PAGE = 16
BLOCK_S = 0.05  # length of a block of calls, per contender and run


@dataclass(frozen=True)
class Case:
    """`requests` requests of `new` rows after `cached` keys each."""

    kind: str
    heads: int
    kv_heads: int
    d: int
    requests: int
    cached: int
    new: int

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} d{self.d}"
        return f"{self.kind} {heads} {self.requests}x{self.new} after {self.cached}"

    @property
    def targets(self) -> dict[str, float]:
        """The least speed relative to each peer."""
        if self.kind == "prefill":
            return {"contiguous": 0.5}
        return {"gathered": 1.5 if self.requests == 1 else 2.0, "contiguous": 0.75}


def cases(quick: bool) -> list[Case]:
    shapes = [("decode", b, s - 1, 1) for b in (1, 8, 32) for s in (512, 2048)]
    shapes += [("prefill", 1, 0, 1024), ("prefill", 4, 0, 512), ("prefill", 8, 1024, 32)]
    if quick:
        return [Case("decode", 8, 2, 64, 8, 511, 1), Case("prefill", 8, 2, 64, 1, 0, 1024)]
    return [
        Case(kind, h, kv, d, b, cached, new)
        for h, kv in HEADS
        for d in HEAD_SIZES
        for kind, b, cached, new in shapes
    ]


def run(args: argparse.Namespace) -> int:
    """Measures every case, prints a table, writes JSON; returns 1 if a target was missed."""
    if args.device == "cuda":
        return run_on_card("attention", args)
    bench = Bench(args, runs=9, tries=4)
    bench.document["page_size"] = PAGE
    for case in cases(args.quick):
        note(case.name)
        ways = {name: called(call, BLOCK_S) for name, call in contenders(case).items()}
        timing = bench.alternate(ways).scaled(1e6)
        bench.add({"case": case.name, **bench.result(timing, "us", case.targets)})
    return bench.publish()


def contenders(case: Case) -> dict[str, Callable[[], object]]:
    """Returns the same attention three ways, on random data, after comparing the outputs."""
    gen = torch.Generator().manual_seed(0)
    kv_len = case.cached + case.new
    shape = (case.requests, case.kv_heads, kv_len, case.d)
    k, v = (torch.randn(shape, generator=gen) for _ in range(2))
    q = torch.randn(case.requests * case.new, case.heads, case.d, generator=gen)
    spec, plan, pool, slots = setup(case)
    for storage, values in zip(pool.storages[0], (k, v), strict=True):
        storage[slots.reshape(-1)] = values.permute(0, 2, 1, 3).reshape(-1, case.kv_heads, case.d)
    backend, _ = select.select("cpu", [spec], "cpu")
    layout = layout_of(plan.bucket, (spec,), backend)
    image = np.zeros(layout.length, np.int32)
    variants = lower(plan, (), backend, layout, image)
    (handle,) = handles_of(layout, layout.views(torch.from_numpy(image)), variants, backend)
    keys, attn = pool.keys(0), spec.layers[0]
    queries = q.view(case.requests, case.new, case.heads, case.d).transpose(1, 2).contiguous()
    sdpa = peer(case)

    def gathered() -> Tensor:
        ks, vs = (t[slots].permute(0, 2, 1, 3) for t in keys)
        return sdpa(queries, ks, vs)

    ways: dict[str, Callable[[], object]] = {
        "lockstep": lambda: backend.attend(q, keys, handle, attn),
        "contiguous": lambda: sdpa(queries, k, v),
        "gathered": gathered,
    }
    out = backend.attend(q, keys, handle, attn)[0].view(case.requests, case.new, case.heads, -1)
    for other in (sdpa(queries, k, v), gathered()):
        worst = float((out.transpose(1, 2) - other).abs().max())
        if not worst < 1e-4:
            raise RuntimeError(f"{case.name}: the contenders disagree by {worst}")
    return ways


def peer(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns torch's SDPA, whose causal flag ignores a prefix: rows after one need a mask."""
    mask, kv_len = None, case.cached + case.new
    if case.cached and case.new > 1:
        mask = torch.arange(kv_len)[None] <= torch.arange(case.cached, kv_len)[:, None]
    causal = case.new > 1 and mask is None
    return lambda q, k, v: scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
    )


def setup(case: Case) -> tuple[GroupSpec, StepPlan, Pool, Tensor]:
    """Returns a one-layer model's group, the step's plan, its pool, and slots [requests,
    kv_len]."""
    spec = GroupSpec(
        Layout.DENSE, case.heads, case.kv_heads, case.d, case.d, (AttnSpec(case.d**-0.5),), PAGE
    )
    kv_len = case.cached + case.new
    num_pages = case.requests * -(-kv_len // PAGE) + 1
    pages, pool = PagePool(num_pages), Pool(spec, num_pages, Ops())
    np.random.default_rng(0).shuffle(pages._free)
    tables = [PageTable(CacheGroups((spec,), (pages,))) for _ in range(case.requests)]
    for table in tables:
        table.reserve(kv_len)
    work = [RequestWork(case.cached, case.new, (table.pages(0),)) for table in tables]
    plan = build((spec,), work)
    check(plan, (num_pages,))
    slots = np.stack([table.slots(0, np.arange(kv_len, dtype=np.int32)) for table in tables])
    return spec, plan, pool, torch.from_numpy(slots).long()
