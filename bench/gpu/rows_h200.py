"""Everything between the GEMMs, on one GPU: norms, rotation, gate, experts, sampler and
log-probabilities. Run it on the card.

Times are medians of CUDA graphs of 20 launches on random data, with the caches as a step leaves
them; beside each is the time to move its bytes at 4,250 GB/s. Shapes: Qwen3-8B's rows and heads,
Qwen3-30B-A3B's experts, a vocabulary of 151,936. Bits are not checked here:
`tests/triton_gemm_cells.py --device cuda` does that.

usage: PYTHONPATH=. python bench/gpu/rows_h200.py [--out FOLDER]     (writes FOLDER/rows-h200.json)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import torch

from bench.gpu.gemm_h200 import Timer, machine
from lockstep.kernels.triton import moe, rowwise, sample
from lockstep.kernels.triton.gemm import Tile
from lockstep.ops import Heads, Routing

ROWS = (1, 64, 256, 2048)
HIDDEN, INNER, Q_HEADS, KV_HEADS, D, VOCAB = 4096, 12288, 32, 8, 128, 151936
EXPERTS, PER_TOKEN, MOE_HIDDEN, MOE_INNER = 128, 8, 2048, 768


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def row_calls(rows: int) -> dict:
    """Returns name → (call, bytes that it must move)."""
    x, residual, weight = drawn(rows, HIDDEN), drawn(rows, HIDDEN), drawn(HIDDEN).float()
    qkv, up = drawn(rows, (Q_HEADS + 2 * KV_HEADS) * D), drawn(rows, 2 * INNER)
    cos, sin, weights = (drawn(n, d).float() for n, d in ((rows, 64), (rows, 64), (2, D)))
    positions, freqs = torch.arange(rows, device="cuda").int(), drawn(64).float()
    heads = Heads(Q_HEADS, KV_HEADS, D, 1e-6)
    turned = rows * (Q_HEADS + KV_HEADS) * D * 4 + rows * 64 * 8
    return {
        "rms norm": (lambda: rowwise.rms_norm(x, weight, 1e-6), 4 * rows * HIDDEN),
        "add rms norm": (
            lambda: rowwise.add_rms_norm(x, residual, weight, 1e-6),
            8 * rows * HIDDEN,
        ),
        "qk norm rope": (lambda: rowwise.qk_norm_rope(qkv, heads, weights, (cos, sin)), turned),
        "cos sin": (lambda: rowwise.rope_cos_sin(positions, freqs, 1.0), rows * 64 * 8),
        "silu and mul": (lambda: rowwise.act_and_mul(up, "silu"), 6 * rows * INNER),
    }


def expert_calls(rows: int) -> dict:
    """Returns the calls of a layer of experts."""
    routing = Routing(PER_TOKEN, EXPERTS, norm=True)
    x, router = drawn(rows, MOE_HIDDEN), drawn(EXPERTS, MOE_HIDDEN).float()
    up, down = drawn(EXPERTS, 2 * MOE_INNER, MOE_HIDDEN), drawn(EXPERTS, MOE_HIDDEN, MOE_INNER)
    logits = moe.router(x, router)
    routes = moe.route(logits, routing, None)
    inner, parts = drawn(rows * PER_TOKEN, MOE_INNER), drawn(rows * PER_TOKEN, MOE_HIDDEN)
    ids, weights, *_ = routes
    used = len(ids.unique())
    tile = Tile(16 if rows * PER_TOKEN <= 16 * EXPERTS else 64, 64, 128, 4, 4)
    return {
        "router": (lambda: moe.router(x, router), router.numel() * 4 + x.numel() * 2),
        "route and list": (lambda: moe.route(logits, routing, None), logits.numel() * 4),
        "list pairs": (lambda: moe.listed(ids, weights, EXPERTS), ids.numel() * 8),
        "experts up": (
            lambda: moe.grouped_gemm(x, up, None, routes, tile),
            used * up[0].numel() * 2 + rows * PER_TOKEN * 4 * MOE_INNER,
        ),
        "experts down": (
            lambda: moe.grouped_gemm(inner, down, None, routes, tile),
            used * down[0].numel() * 2 + inner.numel() * 2 + parts.numel() * 2,
        ),
        "combine": (lambda: moe.combine(parts, routes), parts.numel() * 2 + x.numel() * 2),
    }


def sampler_calls(rows: int) -> dict:
    """Sampling at temperature 0.6, plain and with top-k and top-p, and log-probabilities."""
    logits = 2 * drawn(rows, VOCAB, dtype=torch.float32)
    plain = torch.tensor([[0.6, 1.0, -torch.inf]] * rows, dtype=torch.float64, device="cuda")
    cut = torch.tensor([[0.6, 0.95, -torch.inf]] * rows, dtype=torch.float64, device="cuda")
    ints = torch.tensor([[VOCAB, 7, 0, 1, 2]] * rows, device="cuda")
    few = torch.tensor([[50, 7, 0, 1, 2]] * rows, device="cuda")
    tokens, size = torch.arange(rows, device="cuda"), 4 * rows * VOCAB
    return {
        "sample": (lambda: sample.sample_tokens(logits, plain, ints, False), size),
        "sample, top-k 50 and top-p 0.95": (
            lambda: sample.sample_tokens(logits, cut, few, True),
            size,
        ),
        "log-probabilities": (lambda: sample.compute_logprobs(logits, tokens, 0), size),
        "log-probabilities, best 5": (lambda: sample.compute_logprobs(logits, tokens, 5), size),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    args = parser.parse_args()
    found: dict[str, dict[int, dict[str, float]]] = {}
    for rows in ROWS:
        calls = row_calls(rows) | expert_calls(rows) | (sampler_calls(rows) if rows < 2048 else {})
        for name, (call, size) in calls.items():
            timer = Timer(lambda *_, call=call: call(), None, [None], None, 20)
            timer.sample(2)
            us = statistics.median(timer.sample(5))
            found.setdefault(name, {})[rows] = {"us": us, "floor_us": size / 4.25e6}
    for name, by_rows in found.items():
        cells = (f"{r}: {c['us']:.1f} ({c['floor_us']:.1f})" for r, c in by_rows.items())
        print(f"{name:<34} {'  '.join(cells)}", flush=True)
    result = {"machine": machine(), "us and floor_us by name and rows": found}
    Path(args.out, "rows-h200.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
