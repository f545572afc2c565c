"""GEMM on one GPU: which calls are in the bit class of our order, and how fast each is. Run it on
the card.

For every (N, K, M): torch's cuBLAS call, cuBLASLt's proposals without a split of K, and our tiles.
Every output is compared whole, bit for bit, with the first M rows of one reference (a plain tile
over all rows), which is compared with float64 on sampled rows; outputs are poisoned before. Data:
half the rows and half the weights have a wide spread of exponents. Times: CUDA graphs of many
launches over rotated weights that together exceed the L2 several times, interleaved rounds,
medians. Floors (copy, GEMM 8192³) come from the same call.

usage: python bench/gpu/gemm_h200.py [--out FOLDER] [--model 8b|0.6b] [--sections
    floors,4096x12288,...] (writes FOLDER/gemm-h200.json)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from lockstep.kernels.triton.cublas import CublasLt, torch_gemm
from lockstep.kernels.triton.gemm import Tile, gemm, warm
from lockstep.kernels.triton.gemm_choice import GRID, REFERENCE, differing

SHAPES = {
    "8b": ((4096, 4096), (4096, 12288), (6144, 4096), (24576, 4096), (151936, 4096)),
    "0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
}
L2_BYTES = 60 << 20
LIMIT = 224 << 10


def small(n: int) -> list[Tile]:
    """Tiles of 16 rows: N decides how many columns fill the card."""
    narrow = [
        Tile(16, 32, 256, 4, 6),
        Tile(16, 32, 128, 4, 8),
        Tile(16, 32, 256, 4, 4),
        Tile(16, 16, 256, 4, 8),
    ]
    wide = [
        Tile(16, 64, 128, 4, 5),
        Tile(16, 64, 256, 4, 5),
        Tile(16, 128, 128, 4, 5),
        Tile(16, 32, 256, 4, 6),
    ]
    return narrow if n <= 8192 else wide


def some(n: int) -> list[Tile]:
    """17 to 64 rows: 64 of them make warpgroup products, and rows that are not there cost no
    reading."""
    found = [
        Tile(64, 32, 128, 4, 8),
        Tile(64, 32, 256, 4, 4),
        Tile(64, 64, 128, 4, 6),
        Tile(32, 32, 256, 4, 4),
    ]
    return found if n <= 8192 else [*found, Tile(64, 128, 128, 4, 4)]


def many(n: int, rows: int) -> list[Tile]:
    """128 rows and more: warp-specialised; plain where few rows leave multiprocessors idle."""
    found = [
        Tile(128, 128, 64, 8, 5, 8, True),
        Tile(128, 256, 64, 8, 3, 8, True),
        Tile(128, 128, 64, 8, 4),
    ]
    if rows <= 512:
        found += [Tile(128, 64, 64, 8, 8, 8, True), Tile(128, 64, 128, 8, 4, 8, True)]
    if rows <= 256 and n <= 8192:
        found += [
            Tile(64, 64, 128, 4, 6),
            Tile(128, 32, 128, 4, 4),
            Tile(128, 64, 64, 4, 6),
            Tile(128, 64, 128, 4, 4),
        ]
    return found


def tiles(n: int, k: int, rows: int) -> list[Tile]:
    found = small(n) if rows <= 16 else some(n) if rows <= 64 else many(n, rows)
    return [t for t in found if shared(t) <= LIMIT]


def shared(tile: Tile) -> int:
    """Bytes, about: the warp-specialised kernel also stages its output; the plain one may keep a
    step less than its stages in flight."""
    return (
        tile.shared_bytes + tile.rows * tile.columns * 2
        if tile.hopper
        else tile.shared_bytes - tile.shared_bytes // tile.stages
    )


class Offline:
    """Stands for the driver in processes that only compile: says what the card is, reaches none."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


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


def compile_all(shapes, grid, jobs: int) -> list[str]:
    """Every variant the sections will launch; forked workers, so nothing is imported twice."""
    tasks = list(
        dict.fromkeys(
            (n, k, t) for n, k in shapes for m in grid for t in [*tiles(n, k, m), REFERENCE]
        )
    )
    print(f"{len(tasks)} variants, {jobs} processes", flush=True)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        return [said for said in pool.map(compile_one, tasks) if said]


def spread(count: int, k: int) -> torch.Tensor:
    """[count, k] bfloat16: every other row has exponents spread over many binades."""
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
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(replays)
        ]
        for first, last in marks:
            first.record()
            self.graph.replay()
            last.record()
        torch.cuda.synchronize()
        return [first.elapsed_time(last) * 1e3 / self.launches for first, last in marks]


def measure(calls: dict, x, weights, y, guess_us: float) -> dict[str, float]:
    """Median microseconds of every call: three interleaved rounds."""
    launches = max(1, min(len(weights) * (1 + int(150 / max(guess_us * len(weights), 1))), 64))
    timers, times = {}, {}
    for name, call in calls.items():
        try:
            timers[name] = Timer(call, x, weights, y, launches)
        except Exception as error:
            print("   failed", name, str(error)[:200], flush=True)
            torch.cuda.synchronize()
    replays = max(2, min(8, int(2500 / max(guess_us * launches, 1))))
    for timer in timers.values():
        timer.sample(2)
    for _ in range(3):
        for name, timer in timers.items():
            times.setdefault(name, []).extend(timer.sample(replays))
    return {name: statistics.median(values) for name, values in times.items()}


def proposals(blas, n: int, k: int, rows: int, count: int) -> dict:
    try:
        return {
            f"lt{i}": call
            for i, call in enumerate(blas.proposals(n, k, rows, torch.bfloat16, count))
        }
    except Exception as error:
        print("   cuBLASLt:", str(error)[:200], flush=True)
        return {}


def shape(n: int, k: int, keep, grid=GRID, deadline: float = 1e18) -> list[dict]:
    """All M of one weight."""
    torch.manual_seed(n + k)
    blas = CublasLt()
    copies = max(1, min(32, -(-4 * L2_BYTES // (n * k * 2))))
    w = spread(n, k)
    weights = [w] + [w.clone() for _ in range(copies - 1)]
    x_all = spread(max(grid), k)
    want = torch.full((max(grid), n), float("nan"), device="cuda", dtype=torch.bfloat16)
    gemm(x_all, w, want, REFERENCE)
    rows = torch.randint(0, max(grid), (32,), device="cuda")
    exact = torch.cat(
        [x_all[rows].double() @ w[i : i + 16384].double().t() for i in range(0, n, 16384)], 1
    )
    scale = (
        x_all[rows].double().abs().mean(1, keepdim=True) * w.double().abs().mean() * k**0.5
        if n < 100000
        else exact.abs().mean()
    )
    error = float((want[rows].double() - exact).norm() / exact.norm())
    found = [
        {
            "n": n,
            "k": k,
            "copies": copies,
            "error": error,
            "scale": float(torch.as_tensor(scale).mean()),
            "nan": int(want.isnan().sum()),
        }
    ]
    print(found[0], flush=True)
    for m in grid:
        if time.time() > deadline:
            found.append({"m": m, "skipped": "out of time"})
            continue
        found.append(cell(blas, x_all, weights, want, m))
        keep(found)
    return found


def cell(blas, x_all, weights, want, m: int) -> dict:
    """One (N, K, M): classes, then times of those in the class and of cuBLAS."""
    w = weights[0]
    (n, k), x = w.shape, x_all[:m]
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    calls = {"cublas": torch_gemm} | proposals(blas, n, k, m, 8)
    calls |= {t.name: (lambda x, w, y, t=t: gemm(x, w, y, t)) for t in tiles(n, k, m)}
    differ = {}
    for name, call in list(calls.items()):
        y.fill_(float("nan"))
        try:
            call(x, w, y)
            torch.cuda.synchronize()
            differ[name] = differing(y, want)
        except Exception as error:
            print("   failed", name, str(error)[:200], flush=True)
            del calls[name]
    guess = max(n * k * 2 / 4e6, 2 * m * n * k / 7e8) / 1.0
    timed = {name: call for name, call in calls.items() if differ[name] == 0 or name == "cublas"}
    us = measure(timed, x, weights, y, guess)
    ours = {name: t for name, t in us.items() if name[0] in "th"}
    usable = {name: t for name, t in us.items() if differ[name] == 0}
    own, best = min(ours, key=ours.get, default=""), min(usable, key=usable.get, default="cublas")
    floor = max((n * k + m * k + m * n) * 2 / 4.25e6, 2 * m * n * k / 7.9e8)
    short = {name: round(t, 2) for name, t in sorted(us.items(), key=lambda item: item[1])[:6]}
    print(f"{n}x{k} M{m}: cuBLAS {us['cublas']:.1f} differ {differ['cublas']}; own {own} "
          f"x{ours.get(own, 0) / us['cublas']:.3f}; "
          f"best {best} x{us[best] / us['cublas']:.3f}; floor {floor:.1f} {short}", flush=True)  # fmt: skip
    return {
        "m": m,
        "us": us,
        "differ": differ,
        "own": own,
        "best": best,
        "floor_us": floor,
        "elements": m * n,
    }


def floors() -> dict:
    """Copy bandwidth and the rate of a large GEMM."""
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copies, products = Timer(lambda *_: b.copy_(a), x, [x], y, 1), Timer(torch_gemm, x, [x], y, 1)
    copies.sample(20)  # clocks
    copy, product = statistics.median(copies.sample(20)), statistics.median(products.sample(20))
    return {
        "copy_gb_s": 2 * a.numel() * 4 / copy / 1e3,
        "gemm_tflop_s": 2 * 8192**3 / product / 1e6,
    }


def machine() -> dict:
    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    )
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "card": driver.stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--model", default="8b")
    parser.add_argument("--shapes", default="", help="NxK,NxK instead of a model's")
    parser.add_argument("--grid", default="")
    parser.add_argument("--limit", type=int, default=60, help="seconds per shape")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile"
    )
    parser.add_argument("--section")
    args = parser.parse_args()
    listed = [tuple(int(v) for v in s.split("x")) for s in args.shapes.split(",") if s]
    shapes = listed or SHAPES[args.model]
    grid = tuple(int(m) for m in args.grid.split(",") if m) or GRID
    if args.section == "compile":
        begin = time.time()
        failed = compile_all(shapes, grid, args.jobs)
        print(f"compiled in {time.time() - begin:.0f} s; failed: {failed}", flush=True)
        return
    if args.section == "floors":
        Path(args.out, "part-floors.json").write_text(json.dumps(floors() | machine()))
        return
    if args.section:
        n, k = (int(v) for v in args.section.split("x"))
        part = Path(args.out, f"part-{args.section}.json")
        shape(
            n, k, lambda found: part.write_text(json.dumps(found)), grid, time.time() + args.limit
        )
        return
    sections = ["compile", "floors"] + [f"{n}x{k}" for n, k in shapes]
    for section in sections:
        run_section([sys.executable, *sys.argv, "--section", section], args.limit + 20)
    result = {"command": " ".join(sys.argv)}
    for section in sections:
        part = Path(args.out, f"part-{section}.json")
        if part.exists():
            result[section] = json.loads(part.read_text())
            part.unlink()
    Path(args.out, f"gemm-h200-{args.model}.json").write_text(json.dumps(result))


def run_section(command: list[str], seconds: int) -> None:
    """A section in a process group of its own, ended with all its children when its time is
    over."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print("out of time:", command[-1], flush=True)


if __name__ == "__main__":
    main()
