"""Attention on one GPU: bits of the warp-specialised prefill against its plain twin, and the speed
of decode and prefill.

Sections, each in a process of its own under a time limit: `bits` (all rows, odd lengths, 1 to n
tiles, several items per program), `decode` and `prefill` (CUDA graphs, L2 flushed, medians, random
data, poisoned outputs) with floors measured in the same call.

usage: python -m bench.gpu.attention_h200 [--out FOLDER] [--sections bits,decode,prefill]       (writes FOLDER/attention-h200.json)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from bench.gpu import order_sm90
from bench.gpu.order_sm90 import Case, floors, timed
from lockstep.kernels.triton import items, launch
from lockstep.kernels.triton.launch import Tuning
from lockstep.order import SM90, attention_order

DECODE = ((1, 1024), (1, 4096), (1, 32768), (8, 8192), (64, 2048), (64, 8192), (256, 2048))
PREFILL = ((16, 1024, 1024), (4, 4096, 4096), (1, 16384, 16384), (8, 4352, 256), (1, 33280, 512))
# recorded on an H200: the best of FlashInfer 0.7.2, XQA and FA4 4.0.0b36 in microseconds; FA4 paged
# 16 in TFLOP/s
PEERS = {
    "B1 S4096": 18.3, "B1 S32768": 53.2, "B8 S8192": 84.4, "B64 S2048": 147.8, "B64 S8192": 504.8, "B256 S2048": 518.7,
    "B16 S1024 N1024": 369.0, "B4 S4096 N4096": 525.0, "B1 S16384 N16384": 588.0,
}  # fmt: skip


def prefill_call(case: Case, order):
    made = items.items(case.rows, np.arange(case.batch), 1, 128, order.splits, False)
    table = torch.from_numpy(made.table).cuda()
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    return lambda: launch.prefill(
        case.q, (case.k, case.v), case.out, case.lse, table, case.at, case.scoring, order, programs
    )


def decode_call(case: Case, order):
    made = items.items(
        case.rows, np.arange(case.batch), case.heads // case.kv_heads, 16, order.splits, True
    )
    table = torch.from_numpy(made.table).cuda()
    room = launch.scratch(
        made.part_rows * case.kv_heads,
        made.counters * case.kv_heads,
        case.d_v,
        torch.device("cuda"),
    )
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    return lambda: launch.decode(
        case.q,
        (case.k, case.v),
        case.out,
        case.lse,
        table,
        case.at,
        case.scoring,
        room,
        order,
        programs,
    )


FEW_ROWS = (
    (1, 1, 1),
    (3, 100, 1),
    (8, 1000, 1),
    (64, 777, 1),
    (1, 9001, 1),
    (5, 2500, 4),
    (2, 5000, 16),
    (3, 700, 100),
    (300, 1300, 1),
)
MANY_ROWS = ((3, 1, 1), (2, 77, 77), (5, 128, 128), (7, 300, 300), (2, 1500, 1500), (3, 2333, 700), (1, 5001, 1200), (40, 520, 520),
             (2, 6007, 129))  # fmt: skip


order_sm90.WARM_SECONDS = 0.08


def bits() -> list[dict]:
    """Warp-specialised against plain, every row."""
    found = []
    for head in ("128", "64"):
        order = attention_order(SM90, *launch_sizes(head))
        cases = [(*c, False, 1 << 30) for c in MANY_ROWS] + [
            (*c, True, w) for c in FEW_ROWS for w in (1 << 30, 333)
        ]
        for batch, length, new, few, window in cases:
            torch.manual_seed(length)
            case = Case(head, batch, length, new, window)
            pages = case.ids.view(batch, -1)
            if length % 16:  # nobody wrote the rest of the last page
                for r in range(batch):
                    begin = int(pages[r, -1]) * 16 + length % 16
                    end = int(pages[r, -1]) * 16 + 16
                    case.k[begin:end] = float("nan")
                    case.v[begin:end] = float("nan")
            results = []
            calls = [decode_call(case, order) if few else prefill_call(case, order)]
            twins = (
                (Tuning(16, 4, 4, True), Tuning(64, 4, 2, True))
                if few
                else (Tuning(128, 8, 3, False), Tuning(64, 4, 2, True))
            )
            calls += [case.launcher(order.tile, order.splits, t) for t in twins]
            for call in calls:
                case.out.fill_(float("nan"))
                case.lse.fill_(float("nan"))
                call()
                torch.cuda.synchronize()
                results.append((case.out.clone(), case.lse.clone()))
            (o, s), *twins = results
            differ = [int((o.view(torch.int16) != a.view(torch.int16)).sum() + (s.view(torch.int32) != b.view(torch.int32)).sum())
                      for a, b in twins]  # fmt: skip
            check = sorted({0, case.q.shape[0] // 2, case.q.shape[0] - 1})
            want = case.want(check)
            error = float((o[check].double() - want).norm() / want.norm())
            name = (
                f"{head} B{batch} S{length} "
                f"N{new}{' few' if few else ''}{'' if window > length else f' window {window}'}"
            )
            found.append(
                {
                    "case": name,
                    "elements": o.numel(),
                    "differ": differ,
                    "nan": int(o.isnan().sum()),
                    "error": error,
                }
            )
            print(found[-1], flush=True)
    return found


def launch_sizes(head: str) -> tuple[int, int]:
    return (int(head), int(head))


def speed(kind: str) -> list[dict]:
    found = [{"floors": floors()}]
    order = attention_order(SM90, 128, 128)
    cases = [(b, s, 1) for b, s in DECODE] if kind == "decode" else PREFILL
    for batch, length, new in cases:
        torch.manual_seed(length)
        case = Case("128", batch, length, new)
        check = sorted({0, case.q.shape[0] // 2, case.q.shape[0] - 1})
        want = case.want(check)
        if kind == "decode":
            shapes = {
                f"rows{t.rows} w{t.warps} s{t.stages} r{t.registers or 255}": t
                for t in candidates()
            }
            calls = {"warp-specialised": decode_call(case, order)}
            calls |= {
                name: case.launcher(order.tile, order.splits, t) for name, t in shapes.items()
            }
        else:
            calls = {
                "warp-specialised": prefill_call(case, order),
                "plain": case.launcher(order.tile, order.splits, Tuning(128, 8, 3, False)),
            }
        times, outs, control = {}, [], cudnn(case) if kind == "prefill" and new == length else None
        for name, call in calls.items():
            case.out.fill_(float("nan"))
            call()
            torch.cuda.synchronize()
            outs.append(case.out.clone())
            times[name] = timed(call, 100 if kind == "decode" else 20)
        differ = sum(int((o.view(torch.int16) != outs[0].view(torch.int16)).sum()) for o in outs)
        name = f"B{batch} S{length}" + ("" if kind == "decode" else f" N{new}")
        best = min(times, key=times.get)
        rate = (
            case.bytes / times[best] / 1e3 if kind == "decode" else case.flops / times[best] / 1e6
        )
        peer = PEERS.get(name)
        ratio = None if peer is None else peer / times[best] if kind == "decode" else rate / peer
        error = float((outs[0][check].double() - want).norm() / want.norm())
        row = {
            "case": name,
            "us": times,
            "best": best,
            "rate": rate,
            "peer": peer,
            "ratio": ratio,
            "differ": differ,
            "error": error,
        }
        found.append(row | {"cuDNN dense, same call": control})
        unit = "GB/s" if kind == "decode" else "TFLOP/s"
        print(f"{name:20} {best:18} {times[best]:9.1f} us {rate:8.0f} {unit} ratio {ratio} cuDNN "
              f"{control} differ {differ}"
              f" {({k: round(v, 1) for k, v in times.items()})}", flush=True)  # fmt: skip
    return found


def cudnn(case: Case) -> float | None:
    """TFLOP/s of cuDNN on contiguous keys, causal: a control for the card's temperature. None where
    this build has none."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (case.batch, case.length, -1, 128)
    q, k, v = (torch.randn_like(x).view(shape).transpose(1, 2) for x in (case.q, case.k, case.v))
    call = lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            call()
            return case.flops / timed(call, 20) / 1e6
    except RuntimeError as error:
        print("cuDNN:", str(error)[:100])
        return None


def candidates() -> list[Tuning]:
    return [
        Tuning(16, 4, 4, True),
        Tuning(16, 4, 4, True, registers=168),
        Tuning(16, 4, 3, True, registers=168),
        Tuning(64, 4, 5, True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--sections", default="bits,decode,prefill")
    parser.add_argument("--limit", type=int, default=60, help="seconds per section")
    parser.add_argument("--section")
    args = parser.parse_args()
    if args.section:
        rows = bits() if args.section == "bits" else speed(args.section)
        Path(args.out, f"part-{args.section}.json").write_text(json.dumps(rows))
        return
    report: dict = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
    }
    for section in args.sections.split(","):
        try:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "bench.gpu.attention_h200",
                    "--out",
                    args.out,
                    "--section",
                    section,
                ],
                timeout=args.limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(section, "stopped at its time limit", flush=True)
        part = Path(args.out, f"part-{section}.json")
        report[section] = json.loads(part.read_text()) if part.exists() else "failed"
        part.unlink(missing_ok=True)
    import triton

    report["triton"] = triton.__version__
    Path(args.out, "attention-h200.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
