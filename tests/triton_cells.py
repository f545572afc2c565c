"""Attention kernels of the GPU, feature by feature: values against float64, and bits that must not
move. Run as a program.

Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1, set by `tests/test_triton.py`)
with a small order, so that short requests cross many tiles and splits; with `--device cuda` on the
GPU, with the real one. Prints one JSON object: cell → what was found.

usage: python tests/triton_cells.py [--device cuda] [--cells NAME,NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from standalone import standalone

from lockstep import order
from lockstep.attention import reference
from lockstep.attention import triton as backend
from lockstep.kernels.cpu.ops import Ops
from lockstep.kernels.triton import launch
from lockstep.kernels.triton.launch import Tuning
from lockstep.kv.pool import Keys, Pool
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.plan.build import RequestWork, build, node_slots
from lockstep.types import AttnSpec, GroupSpec, Layout

SMALL = order.AttentionOrder(16, order.Splits(count0=2, len0=32, len1=48))
PAGES = 400
WINDOW = 37


def dense(heads: int, kv_heads: int, d: int, d_v: int | None = None, **extra: object) -> GroupSpec:
    group = {k: extra.pop(k) for k in ("window", "kv_dtype") if k in extra}
    attn = AttnSpec(scale=1.5 / d**0.5, **extra)
    group = {"kv_dtype": "bfloat16"} | group
    return GroupSpec(Layout.DENSE, heads, kv_heads, d, d_v or d, (attn,), **group)


def latent(heads: int, d_qk: int, d_v: int, **group: object) -> GroupSpec:
    return GroupSpec(
        Layout.LATENT,
        heads,
        1,
        d_qk,
        d_v,
        (AttnSpec(scale=1.5 / d_qk**0.5),),
        **({"kv_dtype": "bfloat16"} | group),
    )


def fresh(heads: int, kv_heads: int, d: int, causal: bool, window: int | None = None) -> GroupSpec:
    return GroupSpec(
        Layout.FRESH,
        heads,
        kv_heads,
        d,
        d,
        (AttnSpec(scale=1.5 / d**0.5),),
        causal=causal,
        window=window,
    )


SINKS = tuple(0.3 + 0.4 * h for h in range(4))
SMALL_FEATURES = {
    "dense": dense(4, 2, 32),
    "group-7": dense(14, 2, 24),
    "heads-72": dense(72, 1, 16),
    "d-qk-v": dense(4, 2, 48, 32),
    "head-20": dense(4, 2, 20),
    "window": dense(4, 2, 32, window=WINDOW),
    "soft-cap": dense(4, 2, 32, soft_cap=1.5),
    "sinks": dense(4, 2, 32, sinks=SINKS),
    "fp16": dense(4, 2, 32),
    "fp8": dense(4, 2, 32, kv_dtype="float8_e4m3", k_scale=0.02, v_scale=0.01),
    "fp16-kv": dense(4, 2, 32, kv_dtype="float16"),
    "latent": latent(6, 40, 32),
    "window-all": dense(
        4, 2, 32, window=WINDOW, soft_cap=2.0, sinks=SINKS, kv_dtype="float8_e4m3", k_scale=0.02
    ),
    "cross": GroupSpec(
        Layout.CROSS, 4, 2, 32, 32, (AttnSpec(scale=0.3),), kv_dtype="bfloat16", causal=False
    ),
    "encoder": fresh(4, 2, 32, causal=False),
    "embed-window": fresh(4, 2, 32, causal=True, window=WINDOW),
}
CARD_FEATURES = {
    "d64": dense(8, 2, 64),
    "d128": dense(32, 8, 128),
    "d128-sinks": dense(4, 2, 128, sinks=SINKS),
    "d256": dense(8, 2, 256),
    "d192-128": dense(8, 2, 192, 128),
    "mla": latent(24, 576, 512),
    "mla-fp8": latent(24, 576, 512, kv_dtype="float8_e4m3"),
    "group-7": dense(14, 2, 128),
    "heads-72": dense(72, 1, 64),
    "d80": dense(4, 2, 80),
    "window": dense(8, 2, 128, window=1000),
    "soft-cap": dense(8, 2, 128, soft_cap=1.5),
    "fp16": dense(8, 2, 128),
    "fp8": dense(8, 2, 128, kv_dtype="float8_e4m3", k_scale=0.02, v_scale=0.01),
    "window-all": dense(
        4, 2, 128, window=300, soft_cap=2.0, sinks=SINKS, kv_dtype="float8_e4m3", k_scale=0.02
    ),
    "cross": GroupSpec(
        Layout.CROSS, 8, 2, 64, 64, (AttnSpec(scale=0.2),), kv_dtype="bfloat16", causal=False
    ),
    "encoder": fresh(8, 2, 64, causal=False),
    "embed-window": fresh(8, 2, 64, causal=True, window=300),
}


def ops_on(device: str) -> Ops:
    """Returns the CPU's table, whose cache operations are torch's, for tensors of a device."""
    ops = Ops()
    ops.device = torch.device(device)
    return ops


@dataclass(frozen=True)
class Size:
    """The lengths of a cell."""

    lens: tuple[int, ...]
    chunks: tuple[int, ...]  # row counts into which a request is cut, repeatedly
    decodes: int  # rows recomputed as decodes
    judged: int  # last rows of a request that are compared with float64
    tree_at: int  # committed keys before a tree


SMALL_SIZE = Size(lens=(5, 118), chunks=(33, 1, 70), decodes=5, judged=11, tree_at=61)
CARD_SIZE = Size(
    lens=(1, 17, 700, 1025, 1500), chunks=(333, 1, 70, 128), decodes=1200, judged=40, tree_at=1019
)


class Cell:
    """Requests with keys of their own. Every run lays them out again and must give the same
    rows."""

    def __init__(self, name: str, spec: GroupSpec, size: Size, device: str) -> None:
        self.name, self.spec, self.size, self.device = name, spec, size, torch.device(device)
        self.dtype = torch.float16 if name == "fp16" else torch.bfloat16
        random = torch.Generator().manual_seed(len(name))
        draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
        self.k = [draw(n, spec.kv_heads, spec.d_qk) for n in size.lens]
        self.v = [draw(n, spec.kv_heads, spec.d_v) for n in size.lens]
        self.q = [draw(n, spec.heads, spec.d_qk).to(self.dtype) for n in size.lens]
        self.random = random

    def plan(
        self,
        work: list[tuple[int, int, int]],
        page_size: int,
        parents: tuple[int, ...] | None = None,
    ):
        """Builds a step from work: (request, first row, rows). Lays out pages and fills them, with
        NaN elsewhere. Returns spec, plan and keys."""
        spec = replace(self.spec, page_size=page_size)
        cross, uncached = spec.layout is Layout.CROSS, spec.layout is Layout.FRESH
        pages = None if uncached else PagePool(PAGES * 16 // page_size)
        works, slots, tables = [], {}, {}
        for request, first, rows in work:
            ends = [len(self.k[r]) if cross else a + n for r, a, n in work if r == request]
            if uncached:
                works.append(RequestWork(0, rows, (None,)))
                continue
            if request not in tables:
                tables[request] = PageTable(CacheGroups((spec,), [pages]))
                nodes = len(parents) if parents else 0
                tables[request].reserve(max(ends), nodes=nodes, cross_len=max(ends))
                held = tables[request].pages(0)
                slots[request] = tables[request].slots(
                    0, np.arange(first if parents else max(ends), dtype=np.int32)
                )
                if parents:
                    slots[request] = np.concatenate(
                        (slots[request], node_slots(spec, held, np.arange(nodes, dtype=np.int32)))
                    )
            works.append(
                RequestWork(
                    first,
                    rows,
                    (tables[request].pages(0),),
                    None,
                    parents,
                    max(ends) if cross else 0,
                )
            )
        plan = build((spec,), works)
        if (
            len(tables) == len(work) and self.device.type == "cpu"
            # decodes of one request's rows share its pages, which a plan of the engine never does
        ):
            from lockstep.plan.check import check  # needs numba

            check(plan, (PAGES * 16 // page_size,))
        return spec, plan, self.keys(spec, work, slots)

    def keys(self, spec: GroupSpec, work: list[tuple[int, int, int]], slots: dict) -> Keys:
        if spec.layout is Layout.FRESH:
            rows = [(self.k[r][a : a + n], self.v[r][a : a + n]) for r, a, n in work]
            return Keys(*(torch.cat(x).to(self.device, self.dtype) for x in zip(*rows)))

        def poison(shape, dtype, device):
            return torch.full(shape, float("nan"), dtype=dtype, device=device)

        pool = Pool(spec, PAGES * 16 // spec.page_size, Ops(), poison)
        for request, at in slots.items():
            n = len(at)
            pool.write(
                0,
                torch.from_numpy(np.asarray(at, np.int64)),
                self.k[request][:n],
                self.v[request][:n],
            )
        keys = pool.keys(0)
        if self.dtype is torch.float16:
            keys = Keys(keys.k.half(), keys.v.half())
        k = keys.k.to(self.device)
        return Keys(
            k, k[..., : spec.d_v] if spec.layout is Layout.LATENT else keys.v.to(self.device)
        )

    def run(
        self,
        work,
        page_size: int = 16,
        only: Tuning | None = None,
        parents=None,
        judge: bool = False,
    ):
        """Computes the rows of `work` in one step. Returns out and lse (and the reference's, with
        `judge`)."""
        spec, plan, keys = self.plan(work, page_size, parents)
        q = torch.cat([self.q[r][a : a + n] for r, a, n in work])
        pools = [None if spec.layout is Layout.FRESH else Pool(spec, 1, Ops())]
        ours = backend.Backend()
        step = forced(only, lambda: standalone(plan, ours, pools, device=self.device))
        out = ours.attend(q.to(self.device), keys, step.handles[0], spec.layers[0])
        got = tuple(x.cpu() for x in out)
        if not judge:
            return got
        slow = reference.Backend()
        on_cpu = Keys(*(x.cpu() for x in keys))
        (handle,) = standalone(plan, slow, pools).handles
        return got, slow.attend(q, on_cpu, handle, spec.layers[0])


def forced(only: Tuning | None, call: Callable):
    """Runs `call` with one launch shape for every request, or as chosen if `only` is None."""
    if only is None:
        return call()
    old, most = launch.choose, backend.most_items
    backend.most_items = lambda spec, bucket: 8 * most(spec, bucket)  # other shapes need more
    launch.choose = lambda spec, rows, hopper, tree, order: [
        launch.alike(only, np.ones(len(rows.q_indptr) - 1, bool))
    ]
    try:
        return call()
    finally:
        launch.choose, backend.most_items = old, most


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


def compare(found: dict, name: str, got, want) -> None:
    found[name] = differing(got[0], want[0]) + differing(got[1], want[1])


def bits(cell: Cell, found: dict) -> None:
    """Compares everything with one step of all requests, whole."""
    size, lens = cell.size, cell.size.lens
    whole = [(r, 0, n) for r, n in enumerate(lens)]
    base = cell.run(whole)
    begins = np.cumsum((0, *lens))
    alone = [cell.run([w]) for w in whole]
    compare(found, "alone = batch", tuple(torch.cat(x) for x in zip(*alone)), base)
    shapes = [launch.few(cell.spec), launch.some(cell.spec), launch.many(cell.spec)]
    if cell.device.type == "cuda" and not launch.narrow(cell.spec):
        shapes += [replace(shapes[0], warps=w) for w in (1, 2)]
    shapes += warp_specialised(cell)
    for shape in shapes if cell.dtype is torch.bfloat16 else shapes[:3]:
        compare(
            found,
            f"{shape.kernel} rows {shape.rows} warps {shape.warps} parts {shape.parts}",
            cell.run(whole, only=shape),
            base,
        )
    if cell.spec.layout is Layout.FRESH:
        return
    for page_size in (1, 24, 128) if cell.device.type == "cuda" else (1, 24):
        compare(found, f"page size {page_size}", cell.run(whole, page_size=page_size), base)
    for r, n in enumerate(lens):
        if n < max(size.chunks):
            continue
        at, i, parts = 0, 0, []
        while at < n:
            rows = min(size.chunks[i % len(size.chunks)], n - at)
            parts.append(cell.run([(r, at, rows)]))
            at, i = at + rows, i + 1
        got = tuple(torch.cat(x) for x in zip(*parts))
        compare(found, f"chunked {n}", got, tuple(x[begins[r] : begins[r + 1]] for x in base))
    picked = torch.randperm(int(begins[-1]), generator=cell.random)[: size.decodes].tolist()
    owner = np.searchsorted(begins, picked, side="right") - 1
    steps = [(int(r), row - int(begins[r]), 1) for r, row in zip(owner, picked)]
    compare(found, f"{len(steps)} rows as decodes", cell.run(steps), tuple(x[picked] for x in base))


def warp_specialised(cell: Cell) -> list[Tuning]:
    """Returns the launch shapes of the warp-specialised kernels that can run a cell, in parts and
    whole."""
    spec = cell.spec
    chosen = order.attention_order(order.SM90, spec.d_qk, spec.d_v)
    if cell.device.type != "cuda" or not launch.supported_by_hopper(spec, False, chosen):
        return []
    few = launch.LATENT if spec.layout is Layout.LATENT else launch.DECODE
    shapes = [few, replace(few, parts=False)]
    if spec.layout is Layout.DENSE and spec.causal and spec.window is None:
        shapes.append(launch.PREFILL)
    return shapes


def values(cell: Cell, found: dict) -> None:
    """Compares with float64: all requests as extends of their last rows."""
    if cell.spec.layout is Layout.FRESH:
        work = [(r, 0, min(n, 8 * cell.size.judged)) for r, n in enumerate(cell.size.lens)]
    else:
        judged = cell.size.judged
        work = [(r, max(0, n - judged), min(n, judged)) for r, n in enumerate(cell.size.lens)]
    got, want = cell.run(work, judge=True)
    found["values"] = error(got, want)


def error(got, want) -> dict:
    out, lse = (g.double() - w.double() for g, w in zip(got, want))
    return {
        "out": float(out.norm() / want[0].double().norm()),
        "lse": float(lse.abs().max()),
        "nan": int(got[0].isnan().sum()),
    }


def tree(cell: Cell, found: dict) -> None:
    """A tree's rows have the bits of the rows of its paths, each written as a plain request."""
    parents = (-1, 0, 0, 1, 2, 3, -1, 6)
    at, n = cell.size.tree_at, len(parents)
    random = torch.Generator().manual_seed(1)
    keep = cell.k, cell.v, cell.q
    draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    spec = cell.spec
    k, v, q = (
        draw(at + n, spec.kv_heads, spec.d_qk),
        draw(at + n, spec.kv_heads, spec.d_v),
        draw(n, spec.heads, spec.d_qk).to(cell.dtype),
    )
    cell.k, cell.v, cell.q = (
        [k],
        [v],
        [torch.cat((draw(at, spec.heads, spec.d_qk).to(cell.dtype), q))],
    )
    got, want = cell.run([(0, at, n)], parents=parents, judge=True)
    found["tree values"] = error(got, want)
    total = 0
    for node in range(n):
        path, at_node = [node], node
        while parents[at_node] >= 0:
            at_node = parents[at_node]
            path.insert(0, at_node)
        index = [*range(at), *(at + i for i in path)]
        cell.k, cell.v = [k[index]], [v[index]]
        cell.q = [
            torch.cat(
                (
                    torch.zeros(len(index) - 1, spec.heads, spec.d_qk, dtype=cell.dtype),
                    q[node : node + 1],
                )
            )
        ]
        row = cell.run([(0, len(index) - 1, 1)])
        total += differing(row[0], got[0][node : node + 1]) + differing(
            row[1], got[1][node : node + 1]
        )
    found["tree rows = their paths"] = total
    cell.k, cell.v, cell.q = keep


def cache(device: str, found: dict) -> None:
    """The two writers against the pool's own, bit for bit: odd strides, scales that bind, chains of
    moves."""
    from lockstep.kernels.triton import cache as writers

    random = torch.Generator().manual_seed(3)
    cases = (("bfloat16", (1.0, 1.0)), ("float8_e4m3", (0.01, 0.02)))
    for kv_dtype, scales in (
        cases if device == "cuda" else cases[:1]
    ):  # the interpreter rounds to float8 wrongly
        attn = AttnSpec(scale=1.0, k_scale=scales[0], v_scale=scales[1])
        for layout, heads, d_qk, d_v in ((Layout.DENSE, 3, 24, 12), (Layout.LATENT, 1, 40, 32)):
            attn = replace(attn, v_scale=attn.k_scale) if layout is Layout.LATENT else attn
            spec = GroupSpec(layout, 6, heads, d_qk, d_v, (attn, attn), kv_dtype=kv_dtype)
            pools = [
                Pool(
                    spec,
                    9,
                    ops_on(device),
                    lambda shape, dtype, device: torch.zeros(shape, device=device).to(dtype),
                )
                for _ in range(2)
            ]
            rows = (
                torch.randn(20, heads, d_qk + d_v + 8, generator=random).to(device, torch.bfloat16)
                * 4
            )
            # an infinity is stored as the largest number that is kept: 2**100, or the largest of
            # float8
            rows[3, 0, 1], infinite = 2.0**100, rows.clone()
            infinite[3, 0, 1] = float("inf")
            (k, v), (k_in, v_in) = (
                (x[..., :d_qk], x[..., d_qk : d_qk + d_v]) for x in (rows, infinite)
            )
            slots = torch.randperm(140, generator=random)[:20].to(device)
            for layer in range(2):
                pools[0].write(layer, slots, k.float(), v.float())
                given = zip(pools[1].storages[layer], (k_in, v_in), (attn.k_scale, attn.v_scale))
                for storage, values, scale in given:
                    writers.write(storage, slots.int(), values, scale)
            moves = torch.stack(
                (slots[:10], torch.cat((slots[1:10], slots[:1]))), 1
            ).int()  # a ring: every target is a source
            pools[0].move(moves)
            flat = [s for layer in pools[1].storages for s in layer]
            writers.move(flat, moves)
            pairs = zip((s for layer in pools[0].storages for s in layer), flat)
            found[f"{kv_dtype} {layout}"] = sum(
                int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cells", default="")
    parser.add_argument("--checks", default="values,bits,tree")
    args = parser.parse_args()
    card = args.device == "cuda"
    features, size = (CARD_FEATURES, CARD_SIZE) if card else (SMALL_FEATURES, SMALL_SIZE)
    if not card:
        import triton_interpret

        triton_interpret.install()
        order.attention_order = lambda *sizes: SMALL
        launch.few = lambda spec, tree=False: Tuning(
            rows=16, warps=1, stages=1, parts=True, fold_rows=16
        )
        launch.some = lambda spec, tree=False: Tuning(
            rows=64, warps=1, stages=1, parts=True, fold_rows=64
        )
        launch.many = lambda spec, tree=False: Tuning(rows=128, warps=1, stages=1, parts=False)
    report = {}
    if args.checks == "cache":
        report["cache"] = {}
        cache(args.device, report["cache"])
        print(json.dumps(report))
        return
    for name in args.cells.split(",") if args.cells else features:
        found: dict = {}
        begin = time.time()
        cell = Cell(name, features[name], size, args.device)
        checks = {"values": values, "bits": bits}
        if cell.spec.layout in (Layout.DENSE, Layout.LATENT):
            checks["tree"] = tree
        for check_name in args.checks.split(","):
            if check_name in checks:
                checks[check_name](cell, found)
        found["seconds"] = round(time.time() - begin, 1)
        report[name] = found
        print(name, json.dumps(found), file=sys.stderr, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
