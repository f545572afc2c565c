"""Measures, on one GPU, what tiles and splits cost: the figures behind the row of `sm_90` in
`lockstep/order.py`.

Every candidate runs the engine's own kernels: decode with a program per split, folded by the last
to arrive, and prefill folded as it goes. CUDA graphs, the L2 flushed before every run, medians,
random data, outputs poisoned; all outputs of one candidate are compared bit for bit over its launch
shapes, and with float64. Floors (copy bandwidth, GEMM rate) are measured in the same run.

usage: python -m bench.gpu.order_sm90 [--out FOLDER] [--seconds LIMIT] [--heads 128,64]
(run it on the GPU; writes FOLDER/order-sm90.json)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lockstep.kernels.triton import items, launch, variants
from lockstep.kernels.triton.launch import Tuning
from lockstep.order import LOG2E, AttentionOrder, Splits, even
from lockstep.types import INT32_MAX

RULES = {  # named by split counts and lengths
    "512": even(512),
    "1024": even(1024),
    "2048": even(2048),
    "2x512, 1024": Splits(2, 512, 1024),
    "4x512, 1024": Splits(4, 512, 1024),
    "8x512, 1024": Splits(8, 512, 1024),
}
HEADS = {
    "64": (64, 64),
    "128": (128, 128),
    "256": (256, 256),
    "192/128": (192, 128),
    "576/512": (576, 512),
}
TILES = {
    "64": (64, 128),
    "128": (64, 128),
    "256": (32, 64),
    "192/128": (64, 128),
    "576/512": (32, 64),
}
DECODE = ((1, 1024), (1, 4096), (1, 32768), (8, 8192), (64, 2048), (64, 8192), (256, 2048))
FEWER = ((1, 4096), (1, 32768), (8, 8192), (64, 4096))
PREFILL = ((16, 1024), (4, 4096), (1, 16384))
PAGE = 16


def decode_tunings(head: str, tile: int) -> list[Tuning]:
    if head == "576/512":
        plain = [Tuning(64, 8, 2, True, 1), Tuning(16, 4, 2, True, 1)]
        return [launch.LATENT, *plain] if tile == 64 else plain
    if head == "256":
        return [Tuning(16, 4, 3, True, 2), Tuning(16, 2, 3, True, 2)]
    plain = [Tuning(16, 4, 2, True), Tuning(16, 2, 3, True)]
    if head == "192/128":
        return plain
    split = replace(launch.DECODE, stages=launch.DECODE.stages * 128 // tile)
    return [split, replace(split, parts=False), *plain]


def prefill_tunings(head: str, tile: int) -> list[Tuning]:
    if head == "576/512":
        return [Tuning(32, 8, 1, False), Tuning(16, 8, 2, False)]
    if head == "256":
        return [Tuning(64, 8, 2, False), Tuning(64, 4, 2, False)]
    plain = Tuning(128, 8, 3, False)
    if head == "192/128":
        return [plain, Tuning(64, 4, 2, False)]
    return [replace(launch.PREFILL, stages=launch.PREFILL.stages * 128 // tile), plain]


class Case:
    """Requests of equal length on a shuffled page table."""

    def __init__(
        self, head: str, batch: int, length: int, new: int, window: int = INT32_MAX
    ) -> None:
        self.head, self.batch, self.length, self.new = head, batch, length, new
        self.d_qk, self.d_v = HEADS[head]
        self.latent = head == "576/512"
        self.spec = variants.group(self.d_qk, self.d_v, "bfloat16")
        self.heads, self.kv_heads = self.spec.heads, self.spec.kv_heads
        device, dtype = torch.device("cuda"), torch.bfloat16
        pages = -(-length // PAGE)
        self.k = torch.randn(
            batch * pages * PAGE, self.kv_heads, self.d_qk, device=device, dtype=dtype
        )
        self.v = (
            self.k[..., : self.d_v]
            if self.latent
            else torch.randn(*self.k.shape[:2], self.d_v, device=device, dtype=dtype)
        )
        self.ids = torch.randperm(batch * pages, device=device).int()
        self.q = torch.randn(batch * new, self.heads, self.d_qk, device=device, dtype=dtype)
        positions = np.tile(np.arange(length - new, length, dtype=np.int32), batch)
        indptr = (np.arange(batch + 1) * new).astype(np.int32)
        entry = (np.arange(batch) * pages).astype(np.int32)
        lo = np.maximum(positions.astype(np.int64) + 1 - window, 0).astype(np.int32)
        self.rows = items.Rows(indptr, lo, positions + 1, positions + 1, entry)
        positions = torch.from_numpy(positions).to(device)
        self.window = window
        self.out = torch.empty(*self.q.shape[:2], self.d_v, device=device, dtype=dtype)
        self.lse = torch.empty(*self.q.shape[:2], device=device)
        self.tensors = {
            "positions": positions,
            "start": positions + 1,
            "tail_indptr": torch.zeros(len(positions) + 1, dtype=torch.int32, device=device),
            "tail_slots": self.ids,
            "page_ids": self.ids,
            "sinks2": torch.full((self.heads,), -float("inf"), device=device),
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "out": self.out,
            "lse": self.lse,
        }

    def launcher(self, tile: int, splits: Splits, tuning: Tuning, parts: bool | None = None):
        """Returns one launch of all requests, in parts or whole."""
        cut = np.full(self.batch, tuning.parts if parts is None else parts)
        return self.launches(AttentionOrder(tile, splits), [(tuning, np.arange(self.batch), cut)])

    def shipped(self, order: AttentionOrder):
        """Returns the launches that the backend would choose."""
        return self.launches(order, launch.choose(self.spec, self.rows, True, False, order))

    def launches(self, order: AttentionOrder, chosen: list[launch.Choice]):
        device, work = torch.device("cuda"), []
        scoring = {"c": self.d_qk**-0.5 * LOG2E, "pre": 0.0, "v_scale": 1.0, "CAP": False}
        arguments = launch.arguments(self.spec, PAGE, order, tree=False) | scoring | self.tensors
        arguments["window"] = self.window
        for tuning, requests, parts in chosen:
            size = (launch.group_of(self.spec, tuning), tuning.rows)
            table, *rows = items.items(self.rows, requests, *size, order.splits, parts)
            room = launch.scratch(*(n * self.kv_heads for n in rows), self.d_v, device)
            work.append((arguments | room, torch.from_numpy(table).cuda(), tuning))
        return lambda: [launch.launch(*one) for one in work]

    def want(self, rows: list[int]) -> torch.Tensor:
        """Returns float64 outputs of some rows."""
        outs = []
        for row in rows:
            request, p = row // self.new, self.length - self.new + row % self.new
            first = max(0, p + 1 - self.window)
            pages = self.ids.view(self.batch, -1)[request].long()
            slots = (pages[:, None] * PAGE + torch.arange(PAGE, device="cuda")).view(-1)[
                first : p + 1
            ]
            group = self.heads // self.kv_heads
            q = self.q[row].double().view(self.kv_heads, group, -1)
            s = torch.einsum("kgd,nkd->kgn", q, self.k[slots].double()) * self.d_qk**-0.5
            outs.append(
                torch.einsum("kgn,nkd->kgd", s.softmax(-1), self.v[slots].double()).reshape(
                    self.heads, -1
                )
            )
        return torch.stack(outs)

    @property
    def bytes(self) -> int:
        return (
            self.batch
            * self.length
            * self.kv_heads
            * (self.d_qk + (0 if self.latent else self.d_v))
            * 2
        )

    @property
    def flops(self) -> float:
        pairs = sum(self.length - self.new + i + 1 for i in range(self.new)) * self.batch
        return 2.0 * pairs * self.heads * (self.d_qk + self.d_v)


FLUSH = None
WARM_SECONDS = 0.01


def timed(call, reps: int) -> float:
    """Returns median microseconds of a replayed graph: L2 flushed before every run, clocks warm."""
    global FLUSH
    if FLUSH is None:
        FLUSH = torch.empty(160 << 20, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    begin = time.time()
    while time.time() - begin < WARM_SECONDS:
        for _ in range(5):
            FLUSH.zero_()
            graph.replay()
        torch.cuda.synchronize()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(reps)
    ]
    for first, last in marks:
        FLUSH.zero_()
        first.record()
        graph.replay()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in marks) * 1e3


def eager(call) -> float:
    """Returns microseconds of one call outside a graph: a copy inside one would use the copy
    engine, which is slower than the multiprocessors."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def floors() -> dict[str, float]:
    a = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = statistics.median(eager(lambda: b.copy_(a)) for _ in range(10))
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    z = torch.empty_like(x)
    torch.mm(x, y, out=z)
    gemm = timed(lambda: torch.mm(x, y, out=z), 20)
    return {"copy GB/s": 2 * a.numel() / copy / 1e3, "GEMM 8192 TFLOP/s": 2 * 8192**3 / gemm / 1e6}


def measure(kind: str, heads: list[str], write) -> None:
    tunings_of = decode_tunings if kind == "decode" else prefill_tunings
    for head in heads:
        cases = PREFILL if kind == "prefill" else DECODE if head == "128" else FEWER
        if kind == "prefill" and head == "576/512":
            cases = ((4, 1024), (1, 4096))
        for batch, length in cases:
            torch.manual_seed(length + batch)
            case = Case(head, batch, length, 1 if kind == "decode" else length)
            check = sorted({0, case.q.shape[0] // 2, case.q.shape[0] - 1})
            want = case.want(check)
            for tile in TILES[head]:
                for rule, splits in RULES.items():
                    write(
                        candidate(
                            kind, case, tile, rule, splits, tunings_of(head, tile), check, want
                        )
                    )


def candidate(kind, case, tile, rule, splits, tunings, check, want) -> dict:
    times, bits, first, worst = {}, 0, None, 0.0
    for tuning in tunings:
        parts = " parts" if tuning.parts else ""
        name = f"{tuning.kernel}{parts} rows{tuning.rows} w{tuning.warps} s{tuning.stages}"
        try:
            call = case.launcher(tile, splits, tuning)
            case.out.fill_(float("nan"))
            call()
            torch.cuda.synchronize()
        except Exception as error:  # a shape that does not fit the card is recorded
            times[name] = f"{type(error).__name__}: {error}"[:80]
            continue
        if first is None:
            first = case.out.clone()
            worst = float((first[check].double() - want).norm() / want.norm())
        bits += int((case.out.view(torch.int16) != first.view(torch.int16)).sum()) + int(
            case.out.isnan().sum()
        )
        times[name] = timed(call, 40 if kind == "decode" else 8)
    numbers = {k: v for k, v in times.items() if not isinstance(v, str)}
    best = min(numbers, key=numbers.get) if numbers else None
    us = numbers[best] if best else None
    rate = (
        None if us is None else case.bytes / us / 1e3 if kind == "decode" else case.flops / us / 1e6
    )
    return {
        "kind": kind, "head": case.head, "case": f"B{case.batch} S{case.length}", "tile": tile,
        "splits": rule, "us": us, "rate": rate, "best": best, "times": times,
        "differing": bits, "error": worst,
    }  # fmt: skip


def warm(shard: int, shards: int, heads: list[str]) -> None:
    """Compiles this shard's share of all variants, by running them on small shapes."""
    kinds = (("decode", decode_tunings), ("prefill", prefill_tunings))
    work = [(kind, head, tile, tuning) for kind, tunings_of in kinds for head in heads
            for tile in TILES[head] for tuning in tunings_of(head, tile)]  # fmt: skip
    case, key = None, None
    for kind, head, tile, tuning in sorted(work[shard::shards], key=lambda w: w[1]):
        if key != (head, kind):
            case, key = Case(head, 1, 64, 1 if kind == "decode" else 64), (head, kind)
        try:
            case.launcher(tile, RULES["512"], tuning)()
            torch.cuda.synchronize()
        except Exception as error:
            print("warm", head, tile, tuning, str(error)[:100], flush=True)


def table(results: list[dict], kind: str) -> None:
    for head in HEADS:
        cases = list(
            dict.fromkeys(r["case"] for r in results if r["kind"] == kind and r["head"] == head)
        )
        if cases:
            print(
                f"{kind} head {head} ({'us' if kind == 'decode' else 'TFLOP/s'}):",
                " | ".join(cases),
            )
        for tile in TILES[head]:
            for rule in RULES:
                found = {
                    r["case"]: r
                    for r in results
                    if r["kind"] == kind
                    and (r["head"], r["tile"], r["splits"]) == (head, tile, rule)
                }
                value = "us" if kind == "decode" else "rate"
                if found:
                    cells = [
                        f"{found[c][value]:.1f}" if c in found and found[c][value] else "-"
                        for c in cases
                    ]
                    differ = sum(f["differing"] for f in found.values())
                    print(
                        f"  tile {tile:3} splits {rule:20} {' '.join(f'{c:>7}' for c in cells)}  "
                        f"differ {differ}"
                    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--seconds", type=int, default=220)
    parser.add_argument("--heads", default="128,64,256,192/128,576/512")
    parser.add_argument("--section")
    args = parser.parse_args()
    heads = args.heads.split(",")
    lines = Path(args.out, "order-sm90.jsonl")
    if args.section and args.section.startswith("warm"):
        _, shard, shards = args.section.split("-")
        return warm(int(shard), int(shards), heads)
    if args.section:
        with lines.open("a") as file:
            write = lambda row: (file.write(json.dumps(row) + "\n"), file.flush())  # noqa: E731
            if args.section == "floors":
                return write({"kind": "floors", **floors()})
            return measure(args.section, heads, write)
    begin = time.time()
    shards = 16
    command = [sys.executable, "-m", "bench.gpu.order_sm90", "--out", args.out]
    command += ["--heads", args.heads, "--section"]
    workers = [subprocess.Popen([*command, f"warm-{i}-{shards}"]) for i in range(shards)]
    for worker in workers:
        try:
            worker.wait(timeout=max(1, 90 - (time.time() - begin)))
        except subprocess.TimeoutExpired:
            worker.kill()
    print(f"warm {time.time() - begin:.0f} s", flush=True)
    for section in ("floors", "decode", "prefill"):
        at = time.time()
        try:
            subprocess.run(
                [*command, section],
                timeout=max(5, args.seconds - (time.time() - begin)),
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(section, "stopped at its time limit", flush=True)
        print(f"{section} {time.time() - at:.0f} s", flush=True)
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    import triton

    found = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "command": " ".join(sys.argv), "results": results,
    }  # fmt: skip
    Path(args.out, "order-sm90.json").write_text(json.dumps(found, indent=1))
    lines.unlink()
    print([r for r in results if r["kind"] == "floors"])
    for kind in ("prefill", "decode"):
        table(results, kind)
    print("worst error", max(r["error"] for r in results if r.get("error") is not None))


if __name__ == "__main__":
    main()
