"""Attention on one GPU: bits of the warp-specialised kernels against their plain twin, and the
speed of what the backend launches.

Sections, each in a process of its own under a time limit: `bits` (all rows, odd lengths, 1 to n
tiles, NaN in unwritten slots), `decode`, `prefill` (with extends) and `latent` (CUDA graphs, L2
flushed, medians of three rounds, random data, poisoned outputs) with floors measured in the same
run. cuDNN on contiguous keys is a control for the card's temperature.

usage: python -m bench.gpu.attention_h200 [--out FOLDER] [--sections bits,decode,prefill,latent]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench.gpu.order_sm90 import Case, floors, timed
from lockstep.kernels.triton import launch
from lockstep.kernels.triton.launch import Tuning
from lockstep.order import ORDER_NAMES, SM90, attention_order

DECODE = ((1, 1024), (1, 4096), (1, 32768), (8, 8192), (64, 2048), (64, 8192), (256, 2048))
# the last four are extends
PREFILL = ((16, 1024, 1024), (4, 4096, 4096), (1, 16384, 16384),
           (1, 16896, 512), (32, 4160, 64), (8, 4352, 256), (1, 33280, 512))  # fmt: skip
LATENT = (
    (64, 4096, 1),
    (1, 4096, 1),
    (8, 8192, 1),
    (1, 32768, 1),
    (4, 1024, 1024),
    (1, 4096, 4096),
)
# recorded on an H200: the best of FlashInfer 0.7.2, XQA and FA4 4.0.0b36 in microseconds; FA4 paged
# 16 in TFLOP/s
PEERS = {
    "decode": {"B1 S4096": 18.3, "B1 S32768": 53.2, "B8 S8192": 84.4, "B64 S2048": 147.8,
               "B64 S8192": 504.8, "B256 S2048": 518.7},
    "prefill": {"B16 S1024": 369.0, "B4 S4096": 525.0, "B1 S16384": 588.0},
}  # fmt: skip
FEW_ROWS = ((1, 1, 1), (3, 100, 1), (8, 1000, 1), (64, 777, 1), (1, 9001, 1), (5, 2500, 4),
            (2, 5000, 16), (3, 700, 100), (300, 1300, 1))  # fmt: skip
MANY_ROWS = ((3, 1, 1), (2, 77, 77), (5, 128, 128), (7, 300, 300), (2, 1500, 1500),
             (3, 2333, 700), (1, 5001, 1200), (40, 520, 520), (2, 6007, 129))  # fmt: skip
LATENT_ROWS = ((3, 1, 1), (3, 100, 1), (64, 777, 1), (1, 9001, 1), (5, 2500, 4), (2, 1500, 8),
               (2, 700, 77), (1, 3100, 1500), (90, 1100, 1))  # fmt: skip
ANY = 1 << 30


def poison(case: Case) -> None:
    """Writes NaN into the unwritten rest of every last page."""
    if case.length % 16:
        for page in case.ids.view(case.batch, -1)[:, -1].tolist():
            rest = slice(page * 16 + case.length % 16, page * 16 + 16)
            case.k[rest] = case.v[rest] = float("nan")


def result(case: Case, call) -> tuple[torch.Tensor, torch.Tensor]:
    case.out.fill_(float("nan"))
    case.lse.fill_(float("nan"))
    call()
    torch.cuda.synchronize()
    return case.out.clone(), case.lse.clone()


def differing(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> int:
    outs = int((a[0].view(torch.int16) != b[0].view(torch.int16)).sum())
    return outs + int((a[1].view(torch.int32) != b[1].view(torch.int32)).sum())


def off(case: Case, out: torch.Tensor) -> float:
    """Returns the error of three rows against float64."""
    rows = sorted({0, len(out) // 2, len(out) - 1})
    want = case.want(rows)
    return float((out[rows].double() - want).norm() / want.norm())


def bits() -> list[dict]:
    """Compares every kernel, in parts and whole, with two launch shapes of the plain one."""
    small = {"parts": launch.DECODE, "whole": replace(launch.DECODE, parts=False)}
    latent = {"parts": launch.LATENT, "whole": replace(launch.LATENT, parts=False)}
    plain = (Tuning(16, 4, 2, True), Tuning(64, 4, 2, True))
    work = [("576/512", c, w, latent, (Tuning(64, 8, 2, True, 1), Tuning(16, 4, 2, True, 1)))
            for c in LATENT_ROWS for w in (ANY, 333)]  # fmt: skip
    for head in ("128", "64"):
        work += [(head, c, w, small, plain) for c in FEW_ROWS for w in (ANY, 333)]
        work += [(head, c, ANY, {"prefill": launch.PREFILL}, plain) for c in MANY_ROWS]
    found = []
    for head, (batch, length, new), window, kernels, twins in work:
        torch.manual_seed(length)
        case = Case(head, batch, length, new, window)
        poison(case)
        order = attention_order(SM90, case.d_qk, case.d_v)
        calls = [case.launcher(order.tile, order.splits, t) for t in (*kernels.values(), *twins)]
        outs = [result(case, call) for call in calls]
        *ours, first, second = outs
        row = {"case": f"{head} B{batch} S{length} N{new}", "window": min(window, length),
               "elements": outs[0][0].numel() * len(ours), "error": off(case, outs[0][0]),
               "differ": {k: differing(o, first) for k, o in zip(kernels, ours)},
               "twins differ": differing(first, second),
               "nan": sum(int(o[0].isnan().sum()) for o in ours)}  # fmt: skip
        found.append(row)
        if any(row["differ"].values()) or row["twins differ"] or row["nan"]:
            print("DIFFERS", row, flush=True)
    total = sum(row["elements"] for row in found)
    wrong = sum(sum(row["differ"].values()) + row["nan"] for row in found)
    print(f"bits: {len(found)} cases, {wrong} of {total} elements differ", flush=True)
    return found


def speed(section: str) -> list[dict]:
    ceilings = floors()
    print(section, ceilings, flush=True)
    found: list[dict] = [{"floors": ceilings}]
    cases = {"decode": [(b, s, 1) for b, s in DECODE], "prefill": PREFILL, "latent": LATENT}
    for batch, length, new in cases[section]:
        torch.manual_seed(length)
        case = Case("576/512" if section == "latent" else "128", batch, length, new)
        order = attention_order(SM90, case.d_qk, case.d_v)
        call = case.shipped(order)
        error = off(case, result(case, call)[0])
        reps = max(5, min(100, int(6e4 / (case.flops / 5e8 + case.bytes / 4e6))))
        us = statistics.median(timed(call, reps) for _ in range(3))
        compute = case.flops / ceilings["GEMM 8192 TFLOP/s"] / 1e6
        memory = case.bytes / ceilings["copy GB/s"] / 1e3
        name = f"B{batch} S{length}" + (f" N{new}" if new not in (1, length) else "")
        peer = PEERS.get(section, {}).get(name) if new in (1, length) else None
        tflops = case.flops / us / 1e6
        ratio = None if peer is None else peer / us if section == "decode" else tflops / peer
        control = cudnn(case, reps) if section == "prefill" and new == length else None
        row = {"case": name, "new": new, "us": us, "TFLOP/s": tflops,
               "GB/s": case.bytes / us / 1e3, "of the larger floor": max(compute, memory) / us,
               "peer": peer, "ratio": ratio, "cuDNN dense TFLOP/s": control,
               "error": error}  # fmt: skip
        found.append(row)
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(section, shown, flush=True)
    ratios = [row["ratio"] for row in found if row.get("ratio")]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"{section}: mean {mean:.3f}, lowest {min(ratios):.3f}", flush=True)
    return found


def cudnn(case: Case, reps: int) -> float | None:
    """Returns TFLOP/s of cuDNN on contiguous keys, causal; None if this build lacks it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (case.batch, case.length, -1, 128)
    q, k, v = (torch.randn_like(x).view(shape).transpose(1, 2) for x in (case.q, case.k, case.v))
    call = lambda: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
        q, k, v, is_causal=True, enable_gqa=True
    )
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            call()
            return case.flops / timed(call, reps) / 1e6
    except RuntimeError as error:
        print("cuDNN:", str(error)[:100])
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--sections", default="decode,prefill,latent,bits")
    parser.add_argument("--limit", type=int, default=90, help="seconds per section")
    parser.add_argument("--section")
    args = parser.parse_args()
    if args.section:
        rows = bits() if args.section == "bits" else speed(args.section)
        Path(args.out, f"part-{args.section}.json").write_text(json.dumps(rows))
        return
    import triton

    report: dict = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "order": ORDER_NAMES[SM90], "command": " ".join(sys.argv),
    }  # fmt: skip
    command = [sys.executable, "-m", "bench.gpu.attention_h200", "--out", args.out, "--section"]
    for section in args.sections.split(","):
        try:
            subprocess.run([*command, section], timeout=args.limit, check=False)
        except subprocess.TimeoutExpired:
            print(section, "stopped at its time limit", flush=True)
        part = Path(args.out, f"part-{section}.json")
        report[section] = json.loads(part.read_text()) if part.exists() else "failed"
        part.unlink(missing_ok=True)
    Path(args.out, "attention-h200.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
