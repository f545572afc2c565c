"""GEMM on one GPU: which calls are in the bit class of our order, and how fast each is. Run it on
the card.

For every (N, K, M): torch's cuBLAS call, cuBLASLt's proposals without split-K, and our tiles. Every
output is compared whole, bit for bit, with the first M rows of one reference (a plain tile over all
rows), which is compared with float64 on sampled rows; outputs are poisoned before. Data: half the
rows and half the weights have a wide spread of exponents. Times: CUDA graphs of many launches over
rotated weights that together exceed the L2 several times, interleaved rounds, medians. Floors
(copy, GEMM 8192³) are measured in the same run.

With `--chosen`, only the choice of `gemm_choice.choose` is timed, against cuBLAS: the figures of
the committed table, which `--table` fills from files of the search.

usage: python bench/gpu/gemm_h200.py [--model 8b|0.6b] [--shapes NxK,NxK] [--grid M,M] [--chosen]
           [--limit SECONDS] [--out FOLDER]     (writes FOLDER/gemm-h200-MODEL.json)
       python bench/gpu/gemm_h200.py --table FILE FILE
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from lockstep.kernels.triton.gemm import Tile, gemm, gemm_kernel
from lockstep.kernels.triton.gemm_choice import (
    GRID,
    REFERENCE,
    TABLE,
    CublasLt,
    choose,
    differing,
    library_for,
    multiply,
    tile_for,
    torch_gemm,
)

SHAPES = {
    "8b": ((4096, 4096), (4096, 12288), (6144, 4096), (24576, 4096), (151936, 4096)),
    "0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
}
L2_BYTES = 60 << 20
SHARED_BYTES = 224 << 10
CLOSE = 1.01  # ours, else torch's call, is taken unless the fastest beats it by more than this


# ---- candidates ----


def few_rows(n: int) -> list[Tile]:
    """Tiles for 1 to 16 rows: N decides how many columns fill the card."""
    if n <= 2048:
        return [
            Tile(16, 16, 256, 4, 8),
            Tile(16, 16, 512, 4, 5),
            Tile(16, 16, 512, 8, 5),
            Tile(16, 16, 128, 4, 8),
        ]
    if n <= 8192:
        return [
            Tile(16, 32, 256, 4, 6),
            Tile(16, 32, 128, 4, 8),
            Tile(16, 32, 256, 4, 4),
            Tile(16, 16, 256, 4, 8),
        ]
    return [
        Tile(16, 64, 128, 4, 5),
        Tile(16, 64, 256, 4, 5),
        Tile(16, 128, 128, 4, 5),
        Tile(16, 32, 256, 4, 6),
    ]


def some_rows(n: int) -> list[Tile]:
    """Tiles for 17 to 64 rows: 64 rows make warpgroup products; missing rows cost no reads."""
    found = [
        Tile(64, 32, 128, 4, 8),
        Tile(64, 32, 256, 4, 4),
        Tile(64, 64, 128, 4, 6),
        Tile(32, 32, 256, 4, 4),
    ]
    if n <= 2048:
        return [*found, Tile(64, 16, 256, 4, 5), Tile(32, 16, 256, 4, 6)]
    return found if n <= 8192 else [*found, Tile(64, 128, 128, 4, 4)]


def many_rows(n: int, rows: int) -> list[Tile]:
    """Tiles for 128 rows and more: with fewer rows, large tiles leave multiprocessors idle."""
    found = [Tile(128, 128, 64, 8, 4)]
    if rows <= 256 and n <= 8192:
        found += [
            Tile(64, 64, 128, 4, 6),
            Tile(64, 64, 64, 4, 8),
            Tile(128, 32, 128, 4, 5),
            Tile(128, 64, 64, 4, 6),
            Tile(128, 64, 128, 4, 4),
        ]
    if n <= 2048:
        found += [Tile(64, 16, 256, 4, 5), Tile(64, 32, 128, 4, 8), Tile(64, 32, 256, 4, 4)]
    return found


def tiles(n: int, rows: int) -> list[Tile]:
    """Returns the tiles that are tried for one cell."""
    if rows <= 16:
        found = few_rows(n)
    elif rows <= 64:
        found = some_rows(n)
    else:
        found = many_rows(n, rows)
    bytes_of = {t: (t.rows + t.columns) * t.depth * 2 * (t.stages - 1) for t in found}
    return [t for t in found if bytes_of[t] <= SHARED_BYTES]


# ---- compiling ----


class Offline:
    """Replaces the driver in processes that only compile: states the target, accesses no card."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def warm(n: int, k: int, dtype: torch.dtype, tile: Tile) -> None:
    """Compiles what `gemm` would launch into Triton's cache, with CPU tensors in place of the
    device's. Launches nothing."""
    x, w, y = (torch.empty(shape, dtype=dtype) for shape in ((16, k), (n, k), (16, n)))
    shape = {"N": n, "K": k, "BATCH": 1, "X_BATCH": 0, "GROUP": tile.group}
    gemm_kernel.warmup(x, w, y, 16, k // 8, grid=(1,), **shape, **tile.constants)


def compile_one(task: tuple[int, int, Tile]) -> str:
    """Fills Triton's cache, in a process without CUDA."""
    from triton.runtime.driver import driver

    n, k, tile = task
    driver.set_active(Offline())
    try:
        warm(n, k, torch.bfloat16, tile)
    except Exception as error:
        return f"{n}x{k} {tile.name}: {str(error)[:160]}"
    return ""


def compile_all(tasks: list[tuple[int, int, Tile]]) -> None:
    """Compiles every variant to be launched; forked workers, so nothing is imported twice."""
    begin = time.time()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        failed = [text for text in pool.map(compile_one, tasks) if text]
    print(f"{len(tasks)} variants in {time.time() - begin:.0f} s; failed: {failed}", flush=True)


# ---- measuring ----


def spread(count: int, k: int) -> torch.Tensor:
    """Returns [count, k] bfloat16: every other row has exponents spread over many binades."""
    x = torch.randn(count, k, device="cuda")
    for begin in range(0, count, 16384):
        part = x[begin : begin + 16384]
        part[1::2] *= torch.exp2(torch.randint(-6, 7, part[1::2].shape, device="cuda").float())
    return x.to(torch.bfloat16)


class Timer:
    """A captured graph of launches over rotated weights."""

    def __init__(self, call, x, weights, y, launches: int) -> None:
        self.launches = launches
        call(x, weights[0], y)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(launches):
                call(x, weights[i % len(weights)], y)

    def sample(self, replays: int) -> list[float]:
        """Returns microseconds per launch, for every replay."""
        marks = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(replays)]
        for first, last in marks:
            first.record()
            self.graph.replay()
            last.record()
        torch.cuda.synchronize()
        return [first.elapsed_time(last) * 1e3 / self.launches for first, last in marks]


def measure(calls: dict, x, weights, y, guess_us: float) -> dict[str, float]:
    """Returns median microseconds of every call, over three interleaved rounds."""
    launches = max(1, min(len(weights) * (1 + int(150 / max(guess_us * len(weights), 1))), 64))
    replays = max(2, min(8, int(2500 / max(guess_us * launches, 1))))
    timers = {name: Timer(call, x, weights, y, launches) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in timers}
    for timer in timers.values():
        timer.sample(2)
    for _ in range(3):
        for name, timer in timers.items():
            times[name] += timer.sample(replays)
    return {name: statistics.median(values) for name, values in times.items()}


def calls_of(blas, w, m: int, chosen) -> dict:
    """Returns the calls that are compared and timed for one cell."""
    if chosen is not None:
        return {"cublas": torch_gemm, "chosen": partial(multiply, chosen)}
    calls = {"cublas": torch_gemm} | blas.proposals(w, m)
    return calls | {t.name: partial(gemm, tile=t) for t in tiles(len(w), m)}


def cell(calls: dict, x_all, weights, want, m: int) -> dict:
    """Measures one (N, K, M): bit classes, then times of the calls in the class and of cuBLAS."""
    w = weights[0]
    (n, k), x = w.shape, x_all[:m]
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    differ = {}
    for name, call in calls.items():
        y.fill_(float("nan"))
        call(x, w, y)
        differ[name] = differing(y, want[:m])
    guess = max(n * k * 2 / 4e6, 2 * m * n * k / 7e8)
    timed = {name: call for name, call in calls.items() if differ[name] == 0 or name == "cublas"}
    us = measure(timed, x, weights, y, guess)
    floor = max((n * k + m * k + m * n) * 2 / 4.25e6, 2 * m * n * k / 7.9e8)
    found = {"m": m, "elements": m * n, "floor_us": floor, "differ": differ, "us": us}
    if "chosen" in calls:
        (choices,) = calls["chosen"].args
        found["chosen"] = library_for(n, k, m) if m in choices else tile_for(n, k, m).name
    fastest = sorted(us.items(), key=lambda item: item[1])[:5]
    short = " ".join(f"{name} {t:.2f}" for name, t in fastest)
    name, ratio = taken(found)
    print(f"{n}x{k} M{m}: floor {floor:.1f}; {name} x{ratio:.3f}; {short}", flush=True)
    return found


def measure_shape(blas, n: int, k: int, grid, limit: float, is_chosen: bool) -> dict:
    """Measures all M of one weight."""
    torch.manual_seed(n + k)
    copies = max(1, min(32, -(-4 * L2_BYTES // (n * k * 2))))
    w = spread(n, k)
    weights = [w] + [w.clone() for _ in range(copies - 1)]
    x_all = spread(max(grid), k)
    want = torch.full((max(grid), n), float("nan"), device="cuda", dtype=torch.bfloat16)
    gemm(x_all, w, want, REFERENCE)
    rows = torch.randint(0, max(grid), (32,), device="cuda")
    chunks = [x_all[rows].double() @ w[i : i + 16384].double().t() for i in range(0, n, 16384)]
    exact = torch.cat(chunks, 1)
    error = float((want[rows].double() - exact).norm() / exact.norm())
    found = {"n": n, "k": k, "copies": copies, "error": error, "nan": int(want.isnan().sum())}
    print(found, flush=True)
    chosen = choose(w, blas, grid) if is_chosen else None
    deadline, cells = time.time() + limit, []
    for m in grid:
        if time.time() < deadline:
            cells.append(cell(calls_of(blas, w, m, chosen), x_all, weights, want, m))
    return found | {"cells": cells}


def floors() -> dict:
    """Returns copy bandwidth and the rate of a large GEMM."""
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copies = Timer(lambda *_: torch.neg(a, out=b), x, [x], y, 1)  # not the slower copy engine
    products = Timer(torch_gemm, x, [x], y, 1)
    copies.sample(20)  # raises the clocks
    copy, product = statistics.median(copies.sample(20)), statistics.median(products.sample(20))
    copied, flops = 2 * a.numel() * 4, 2 * 8192**3
    return {"copy_gb_s": copied / copy / 1e3, "gemm_tflop_s": flops / product / 1e6}


def machine() -> dict:
    """Returns the versions and the card."""
    import triton

    asked = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    card = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return {"torch": torch.__version__, "triton": triton.__version__, "card": card}


# ---- reading ----


def taken(cell: dict) -> tuple[str, float]:
    """Returns the call that the table takes, and its time relative to cuBLAS's: our tile, else
    torch's call, if no other in the class is faster by CLOSE, else the fastest."""
    usable = {name: us for name, us in cell["us"].items() if cell["differ"][name] == 0}
    if "chosen" in usable:
        return cell["chosen"], usable["chosen"] / cell["us"]["cublas"]
    ours = {name: us for name, us in usable.items() if name[0] == "t"}
    favourites = [*sorted(ours, key=ours.get)[:1], "cublas", min(usable, key=usable.get)]
    limit = CLOSE * min(usable.values())
    name = next(name for name in favourites if usable.get(name, math.inf) <= limit)
    return name, usable[name] / cell["us"]["cublas"]


def summary(result: dict) -> str:
    """Returns a row per shape: the taken call's time relative to cuBLAS's, ᵒ our tile, ᶜ a proposal
    of cuBLASLt; then the mean and the worst."""
    lines, ratios = [], {}
    for shape, found in result["shapes"].items():
        row = []
        for cell in found["cells"]:
            name, ratio = taken(cell)
            ratios[shape, cell["m"]] = ratio
            mark = {"t": "ᵒ", "l": "ᶜ"}.get(name[0], "")
            row.append(f"{ratio:.2f}{mark}")
        lines.append(f"| {shape.replace('x', ' × ')} | {' | '.join(row)} |")
    mean, worst = statistics.fmean(ratios.values()), max(ratios, key=ratios.get)
    lines.append(f"{len(ratios)} cells: mean {mean:.4f}, worst {ratios[worst]:.3f} at {worst}")
    return "\n".join(lines)


def fill_table(files: list[str]) -> None:
    """Writes the committed table from results of the search."""
    shapes: dict[str, dict[str, list[str]]] = {}
    for file in files:
        for shape, found in json.loads(Path(file).read_text())["shapes"].items():
            for cell in found["cells"]:
                ours = {name: us for name, us in cell["us"].items() if name[0] == "t"}
                names = dict.fromkeys((min(ours, key=ours.get), taken(cell)[0]))
                shapes.setdefault(shape, {})[str(cell["m"])] = list(names)
    about = json.loads(TABLE.read_text())["about"]
    rows = ",\n".join(
        f'  "{shape}": {{\n   '
        + ",\n   ".join(f'"{m}": {json.dumps(names)}' for m, names in cells.items())
        + "\n  }"
        for shape, cells in shapes.items()
    )
    TABLE.write_text(f'{{\n "about": {json.dumps(about)},\n "sm_90": {{\n{rows}\n }}\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--model", default="8b")
    parser.add_argument("--shapes", default="", help="NxK,NxK instead of a model's")
    parser.add_argument("--grid", default="")
    parser.add_argument("--limit", type=int, default=60, help="seconds per shape")
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--table", nargs="*", default=[])
    args = parser.parse_args()
    if args.table:
        return fill_table(args.table)
    listed = [tuple(int(v) for v in s.split("x")) for s in args.shapes.split(",") if s]
    shapes = listed or SHAPES[args.model]
    grid = tuple(int(m) for m in args.grid.split(",") if m) or GRID
    wanted = {
        (n, k, tile)
        for n, k in shapes
        for m in grid
        for tile in ([tile_for(n, k, m)] if args.chosen else tiles(n, m)) + [REFERENCE]
    }
    compile_all(sorted(wanted, key=str))
    result = {"command": " ".join(sys.argv), "machine": machine(), "floors": floors(), "shapes": {}}
    print(result["machine"], result["floors"], flush=True)
    blas = CublasLt()
    for n, k in shapes:
        found = measure_shape(blas, n, k, grid, args.limit, args.chosen)
        result["shapes"][f"{n}x{k}"] = found
        Path(args.out, f"gemm-h200-{args.model}.json").write_text(json.dumps(result, indent=1))
        torch.cuda.empty_cache()
    print(summary(result))


if __name__ == "__main__":
    main()
