"""GEMM and row kernels of the GPU, kernel by kernel: values against float64 or the CPU's kernels,
and bits that must not move. A program.

Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1, set by
`tests/test_triton_gemm.py`); with `--device cuda` on the GPU. A machine with a GPU may lack what
the CPU's kernels need: `--record FILE` stores everything that the CPU generated and computed,
`--play FILE` reads it there. `large-vocabularies` runs only if it is named, and is recorded without
interpreting. Prints one JSON object: cell → "" if it passed, or what was found.

usage: python tests/triton_gemm_cells.py [--device cuda] [--cells NAME,NAME] [--record|--play FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton_interpret

    triton_interpret.install()

if "--play" not in sys.argv:
    from lockstep.kernels.cpu import routing as cpu_routing
    from lockstep.kernels.cpu import rows as cpu
    from lockstep.kernels.cpu.ops import Ops as CpuOps

from lockstep.kernels.triton import gemm_choice, moe, rowwise, sample
from lockstep.kernels.triton.gemm import Tile, gemm
from lockstep.ops import Activation, CosSin, Heads, Routing
from lockstep.types import RuleError

DEVICE = "cpu"
HALF_ULP = {
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float32: 2.0**-25,
}  # relative error of one rounding
TILES = (Tile(16, 16, 32, 4, 2), Tile(32, 16, 64, 4, 2), Tile(16, 32, 16, 4, 2, group=1))
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4}  # the CPU's numbers
CELLS: dict[str, Callable[[], str]] = {}
HOST: list[Any] = []  # what the CPU made for this cell, in order
PLAYED = False  # whether HOST is read, not written
KERNELS = os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()  # can run here
# a small vocabulary is cut into parts, one of them of several blocks
sample.BLOCK, sample.WIDE_BLOCK, sample.PARTS = map(tl.constexpr, (256, 256, 4))


def cell(function: Callable[[], str]) -> Callable[[], str]:
    CELLS[function.__name__.replace("_", "-")] = function
    return function


def host(make: Callable[[], Any]) -> Any:
    """Returns a tensor or several that the CPU computes; with `--play`, those recorded on another
    machine."""
    made = HOST.pop(0) if PLAYED else make()
    if not PLAYED:
        HOST.append(copy.deepcopy(made))  # cells write into what they drew
    return made.to(DEVICE) if isinstance(made, Tensor) else tuple(t.to(DEVICE) for t in made)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return host(lambda: torch.randn(*shape, generator=generator).to(dtype))


def same(a: Tensor, b: Tensor, what: str) -> str:
    """Returns "" if both have the same bits, or how many elements differ."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{what}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}; "
    count = int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())
    return f"{what}: {count} of {a.numel()} elements differ; " if count else ""


def near(got: Tensor, want: Tensor, bound: Tensor | float, what: str) -> str:
    """Returns "" if |got - want| <= bound everywhere; NaN never passes."""
    error = (got.double() - want.double()).abs()
    bad = int((~(error <= bound)).sum())
    return (
        f"{what}: {bad} of {got.numel()} beyond the bound, worst {float(error.max()):.3g}; "
        if bad
        else ""
    )


def gemm_bound(x: Tensor, w: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bound: one rounding of the result, and K roundings of partial sums, each at most
    the sum of magnitudes times 2^-23 (truncation allowed)."""
    magnitude = x.double().abs() @ w.double().abs().t()
    return want.abs() * 2 * HALF_ULP[dtype] + magnitude * x.shape[1] * 2.0**-23 + 1e-30


def product(x: Tensor, w: Tensor, tile: Tile) -> Tensor:
    y = torch.full((len(x), len(w)), float("nan"), dtype=x.dtype, device=DEVICE)
    return gemm(x, w, y, tile)


def shapes() -> Iterator[tuple[int, int, int]]:
    yield from ((37, 48, 64), (21, 33, 80), (17, 16, 24))


@cell
def gemm_values() -> str:
    """Odd rows, odd columns, K that is no multiple of a step; rows of a wider matrix."""
    said = ""
    for m, n, k in shapes():
        for dtype in (torch.bfloat16, torch.float16):
            x, w = draw(m, k + 8, dtype=dtype)[:, :k], draw(n, k, dtype=dtype, seed=1)
            want = x.double() @ w.double().t()
            said += near(
                product(x, w, TILES[0]), want, gemm_bound(x, w, want, dtype), f"{m}x{n}x{k} {dtype}"
            )
    return said


@cell
def gemm_bits() -> str:
    """A row's bits: over tiles, over the number of rows, over its index among them."""
    said = ""
    for m, n, k in shapes():
        x, w = draw(m, k), draw(n, k, seed=1)
        whole = product(x, w, TILES[0])
        for tile in TILES:
            said += same(product(x, w, tile), whole, f"{m}x{n}x{k} {tile.name}")
        for count in (1, 2, 16, m - 1):
            for tile in TILES[:2]:
                said += same(
                    product(x[-count:], w, tile),
                    whole[-count:],
                    f"{m}x{n}x{k} last {count} rows {tile.name}",
                )
    return said


@cell
def batched_gemm_bits() -> str:
    """The bits of one GEMM per element of the batch; strided x; odd sizes."""
    rows, batch, n, k = 19, 3, 40, 72
    x, w = draw(rows, batch, k + 8)[..., :k], draw(batch, n, k, seed=1)
    y = torch.empty(rows, batch, n, dtype=x.dtype, device=DEVICE)
    said = ""
    for tile in TILES:
        gemm(x, w, y.fill_(float("nan")), tile)
        for b in range(batch):
            said += same(
                y[:, b].contiguous(),
                product(x[:, b].contiguous(), w[b], TILES[0]),
                f"{tile.name} {b}",
            )
    return said


def norm_bound(want: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Returns the bound: the sum's log2(n) + 1 roundings and its square's count half in the root;
    mean, eps, root, quotient and two products follow."""
    return want.double().abs() * (2 * HALF_ULP[dtype] + (n.bit_length() + 14) * 2.0**-24) + 1e-30


@cell
def rms_norm_values() -> str:
    """Against the CPU's kernel in float32 (both bounded against float64), and against float64 in
    bfloat16."""
    said = ""
    for n in (64, 80, 144):
        x, weight = 3 * draw(5, n, dtype=torch.float32), draw(n, dtype=torch.float32, seed=1)
        exact = (
            x.double()
            * (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt()
            * weight.double()
        )
        said += near(
            rowwise.rms_norm(x, weight, 1e-6),
            exact,
            norm_bound(exact, n, torch.float32),
            f"float32 {n}",
        )
        twin = host(lambda x=x, weight=weight: cpu.rms_norm(x.cpu(), weight.cpu(), 1e-6))
        said += near(
            rowwise.rms_norm(x, weight, 1e-6),
            twin,
            2 * norm_bound(exact, 16 * n, torch.float32),
            f"CPU {n}",
        )
        b = x.bfloat16()
        exact = (
            b.double()
            * (b.double().square().mean(1, keepdim=True) + 1e-6).rsqrt()
            * weight.double()
        )
        said += near(
            rowwise.rms_norm(b, weight, 1e-6),
            exact,
            norm_bound(exact, n, torch.bfloat16),
            f"bfloat16 {n}",
        )
    return said


@cell
def add_rms_norm_is_an_addition_and_a_norm() -> str:
    """The fused kernel reads the rounded sum."""
    said = ""
    for n in (64, 144):
        x, residual, weight = (
            draw(7, n),
            5 * draw(7, n, seed=1),
            draw(n, dtype=torch.float32, seed=2),
        )
        total, y = rowwise.add_rms_norm(x, residual, weight, 1e-5)
        rounded = (x.float() + residual.float()).bfloat16()
        said += same(total, rounded, f"sum {n}") + same(
            y, rowwise.rms_norm(rounded, weight, 1e-5), f"norm {n}"
        )
    return said


@cell
def norm_rows_are_independent() -> str:
    """A row's bits do not depend on the rows beside it."""
    n, said = 144, ""
    x, residual, weight = draw(9, n), draw(9, n, seed=1), draw(n, dtype=torch.float32, seed=2)
    whole = rowwise.add_rms_norm(x, residual, weight, 1e-5)
    layered = rowwise.layer_norm(x, weight, weight, 1e-5)
    for row in range(9):
        alone = rowwise.add_rms_norm(x[row : row + 1], residual[row : row + 1], weight, 1e-5)
        said += same(alone[0], whole[0][row : row + 1], "sum") + same(
            alone[1], whole[1][row : row + 1], "norm"
        )
        said += same(
            rowwise.layer_norm(x[row : row + 1], weight, weight, 1e-5),
            layered[row : row + 1],
            "layer norm",
        )
    return said


@cell
def layer_norm_values() -> str:
    n = 80
    x, weight, bias = (
        draw(5, n, dtype=torch.float32),
        draw(n, dtype=torch.float32, seed=1),
        draw(n, dtype=torch.float32, seed=2),
    )
    d = x.double() - x.double().mean(1, keepdim=True)
    exact = d * (d.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double() + bias.double()
    bound = (
        64
        * 2.0**-24
        * ((exact - bias.double()).abs() + bias.double().abs() + weight.double().abs())
    )
    return near(rowwise.layer_norm(x, weight, bias, 1e-5), exact, bound, "float64")


def angles(t: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(t)[:, None] * torch.logspace(0, -2, half)[None, :] + 0.3
    return host(lambda: (angle.cos(), angle.sin()))


@cell
def rope_values() -> str:
    """Against the CPU's kernels in float32: two products and a sum, in either layout, on whole
    heads or a part of them; with norms and without."""
    said, spec = "", Heads(heads=3, kv_heads=2, d=24, eps=1e-6)
    x, weights = draw(6, 7 * 24, dtype=torch.float32), draw(2, 24, dtype=torch.float32, seed=1)
    for half in (12, 8):
        cos, sin = angles(6, half)
        for norms in (None, weights):
            got = rowwise.qk_norm_rope(x, spec, norms, CosSin(cos, sin))[:2]
            wanted = host(lambda cos=cos, sin=sin, norms=norms: cpu_rope(x, norms, cos, sin))
            for name, a, b in zip("qk", got, wanted, strict=True):
                bound = (b.double().abs().amax(2, keepdim=True) + 1) * 40 * 2.0**-24
                kind = "plain" if norms is None else "normed"
                said += near(a, b, 0.0 if norms is None else bound, f"{name} half {half} {kind}")
    cos, sin = angles(6, 12)
    turned = rowwise.qk_norm_rope(x, Heads(3, 2, 24, 0.0, True), None, CosSin(cos, sin))[0]
    heads = x[:, :72].reshape(6, 3, 24)
    want = host(lambda: cpu.rope(heads.cpu(), CosSin(cos.cpu(), sin.cpu()), True))
    return said + near(turned, want, 0.0, "interleaved")


def cpu_rope(x: Tensor, norms: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the CPU's queries and keys."""
    pair = None if norms is None else norms.cpu()
    heads, cos_sin = Heads(3, 2, 24, 1e-6), CosSin(cos.cpu(), sin.cpu())
    return cpu.qk_norm_rope(x.cpu(), heads, pair, cos_sin)[:2]


@cell
def qk_norm_rope_is_a_norm_and_a_rotation() -> str:
    """The fused kernel rounds between the two; more heads than one program computes; rows do not
    depend on each other."""
    heads, kv_heads, d, t, half = 9, 2, 32, 5, 12
    x, weights = draw(t, (heads + 2 * kv_heads) * d), draw(2, d, dtype=torch.float32, seed=1)
    cos, sin = angles(t, half)
    spec = Heads(heads, kv_heads, d, 1e-6)
    q, k, _ = rowwise.qk_norm_rope(x, spec, weights, CosSin(cos, sin))
    parts = x[:, : (heads + kv_heads) * d].reshape(-1, d)
    key = torch.arange(heads + kv_heads).repeat(t) >= heads
    both = [rowwise.rms_norm(parts, weights[i].contiguous(), 1e-6) for i in range(2)]
    normed = torch.where(key.to(DEVICE)[:, None], both[1], both[0]).reshape(t, -1)
    want = rowwise.qk_norm_rope(normed, spec, None, CosSin(cos, sin))
    said = same(q, want[0], "q") + same(k, want[1], "k")
    for row in range(t):
        at = slice(row, row + 1)
        alone = rowwise.qk_norm_rope(x[at], spec, weights, CosSin(cos[at], sin[at]))
        said += same(alone[0], q[at], "q alone") + same(alone[1], k[at], "k alone")
    return said


@cell
def gates() -> str:
    """Every gate and every function against the CPU's kernels; a row alone; extremes."""
    said = ""
    extremes = torch.tensor([[-200.0, -90.0, -0.0, 0.0, 90.0, 200.0] * 8]).to(DEVICE)
    x = torch.cat([4 * draw(3, 48, dtype=torch.float32), extremes])
    size, one = x.double().abs(), 16 * 2.0**-24
    for name, kind in KINDS.items():
        want, applied = host(lambda k=kind: cpu_gates(x.cpu(), k))
        bound = one * (want.double().abs() + size[:, :24] * size[:, 24:]) + 1e-30
        got = rowwise.act_and_mul(x, name)
        said += near(got, want, bound, name)
        said += same(rowwise.act_and_mul(x[1:2], name), got[1:2], f"{name} alone")
        said += near(rowwise.activate(x, name), applied, one * (size + 1), f"{name} applied")
    want = host(lambda: cpu.soft_cap(x.cpu(), 30.0))
    said += near(rowwise.soft_cap(x, 30.0), want, one * 30, "cap")
    want = host(lambda: cpu.clamped_swiglu(x.cpu(), 1.702, 7.0))
    said += near(rowwise.clamped_swiglu(x, 1.702, 7.0), want, one * 64, "clamped")
    x[0, 3] = torch.nan  # in a gate
    for name in (*KINDS, "clamped"):
        gated = rowwise.activate(x, name, True, 1.702, 7.0).isnan()
        said += "" if gated[0, 3] and gated.sum() == 1 else f"{name}: NaN {gated.sum()} times; "
    b = draw(5, 2 * 48)
    exact = b[:, :48].double() * torch.sigmoid(b[:, :48].double()) * b[:, 48:].double()
    bound = exact.abs() * (2**-8 + 2**-20) + 1e-6
    return said + near(rowwise.act_and_mul(b, "silu"), exact, bound, "silu bfloat16")


def cpu_gates(x: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Returns the CPU's gate and function of one kind."""
    return cpu._run(cpu.GATE, x, kind, 0, columns=24), cpu._run(cpu.MAP, x, kind, 0)


@cell
def bias_is_a_second_rounding() -> str:
    x, bias = draw(4, 40), draw(40, seed=1)
    return same(rowwise.add_bias(x, bias), (x.float() + bias.float()).bfloat16(), "bias")


ROUTINGS = {
    "softmax": Routing(3, 12),
    "softmax normed": Routing(4, 16, norm=True),
    "sigmoid groups": Routing(4, 16, "sigmoid", True, 1e-20, 2.5, 4, 2),
    "chosen": Routing(2, 6, "chosen"),
    "all": Routing(4, 4),
}


@cell
def routing() -> str:
    """Ids are exactly the CPU's, with ties and with a correction; weights differ by the roundings
    of a softmax."""
    said = ""
    for name, how in ROUTINGS.items():
        logits = draw(9, how.experts, dtype=torch.float32)
        logits[1] = 0.5  # all equal: the smallest ids
        logits[2, ::2] = logits[2].max() + 1  # half of them equal
        for bias in (None, draw(how.experts, dtype=torch.float32, seed=1).round(decimals=1)):
            if bias is not None and how.score != "sigmoid":
                continue
            ids, weights, *_ = moe.route(logits, how, bias)
            want_ids, want = host(lambda x=logits, h=how, b=bias: cpu_route(x, h, b))
            if not torch.equal(ids.long(), want_ids):
                said += f"{name}: ids {ids.tolist()} against {want_ids.tolist()}; "
                continue
            said += near(weights, want, want.double().abs() * 40 * 2.0**-24 + 1e-30, name)
            said += same(
                moe.route(logits[3:4].contiguous(), how, bias)[1], weights[3:4], f"{name} alone"
            )
    return said


def cpu_route(logits: Tensor, how: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the CPU's ids and weights."""
    routes = cpu_routing.route(logits.cpu(), how, None if bias is None else bias.cpu())
    return routes.ids, routes.weights


@cell
def a_row_of_nan_changes_no_other_row() -> str:
    """Its ids are experts, its weights are NaN; the other rows do not change."""
    said = ""
    for how in ROUTINGS.values():
        logits = draw(3, how.experts, dtype=torch.float32)
        good = moe.route(logits, how, None)
        logits[1] = torch.nan
        ids, weights, *_ = moe.route(logits, how, None)
        said += (
            "" if 0 <= int(ids.min()) and int(ids.max()) < how.experts else f"ids {ids.tolist()}; "
        )
        said += "" if weights[1].isnan().all() else f"weights {weights[1].tolist()}; "
        said += same(ids[::2], good[0][::2], "ids") + same(weights[::2], good[1][::2], "weights")
    return said


@cell
def router_values() -> str:
    x, w = draw(70, 600), draw(21, 600, dtype=torch.float32, seed=1)
    want = x.double() @ w.double().t()
    bound = (x.double().abs() @ w.double().abs().t()) * 16 * 2.0**-24
    y = moe.router(x, w)
    return near(y, want, bound, "float64") + same(moe.router(x[7:8], w), y[7:8], "alone")


@cell
def grouped_gemm_bits() -> str:
    """The bits of one GEMM per pair; experts with no, one and many rows; x by token and by pair; a
    row alone; combined in slot order."""
    tokens, k, experts, n, depth = 23, 3, 7, 40, 72
    ids = (
        torch.stack(
            [
                torch.randperm(experts - 1, generator=torch.Generator().manual_seed(t))[:k]
                for t in range(tokens)
            ]
        )
        .int()
        .to(DEVICE)
    )
    x, w, bias = draw(tokens, depth), draw(experts, n, depth, seed=1), draw(experts, n, seed=2)
    weights = draw(tokens, k, dtype=torch.float32, seed=3)
    routes = moe.listed(ids, weights, experts)
    counts = torch.bincount(ids.flatten().long(), minlength=experts)
    said = (
        ""
        if torch.equal(routes.counts.long(), counts)
        else f"counts {routes.counts.tolist()} against {counts.tolist()}; "
    )
    order = torch.argsort(ids.flatten().long(), stable=True)
    said += (
        ""
        if torch.equal(routes.pairs.long(), order)
        else "pairs are not listed expert by expert, ascending; "
    )
    wanted = [product(x, w[expert], TILES[0]) for expert in range(experts)]
    offset = [rowwise.add_bias(wanted[expert], bias[expert]) for expert in range(experts)]
    token = torch.arange(tokens, device=DEVICE).repeat_interleave(k)
    want, want_biased = (
        torch.stack(made)[ids.flatten().long(), token] for made in (wanted, offset)
    )
    for tile in TILES[:2]:
        plain, biased = (
            moe.grouped_gemm(x, w, None, routes, tile),
            moe.grouped_gemm(x, w, bias, routes, tile),
        )
        by_pair = moe.grouped_gemm(x.repeat_interleave(k, 0), w, None, routes, tile)
        said += same(plain, want, tile.name) + same(biased, want_biased, f"{tile.name} with a bias")
        said += same(by_pair, plain, "x by pair")
    parts = plain.float() * 1.1
    total = torch.zeros(tokens, n, device=DEVICE)
    for slot in range(k):
        total = total + parts.view(tokens, k, n)[:, slot] * weights[:, slot, None]
    said += same(moe.combine(parts, routes), total, "combined")
    return said + same(
        moe.combine(parts.bfloat16(), routes._replace(weights=weights[:, :1].repeat(1, k))),
        slots_of(parts.bfloat16(), weights, k),
        "combined, rounded",
    )


def slots_of(parts: Tensor, weights: Tensor, k: int) -> Tensor:
    """Returns the sum of the slots in order, all with the first weight, rounded once."""
    total = torch.zeros(len(weights), parts.shape[1], device=DEVICE)
    for slot in range(k):
        total = total + parts.view(len(weights), k, -1)[:, slot].float() * weights[:, :1]
    return total.to(parts.dtype)


def sampling_rows(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits with ties, infinities and NaN, and parameters of every kind."""
    settings = (
        (0.0, vocab, 1.0, 0.0), (1.0, vocab, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, vocab, 0.6, 0.0),
        (0.9, 7, 0.8, 0.0), (1.0, vocab, 1.0, 0.05), (0.8, 1, 1.0, 0.0), (1.0, vocab, 1e-9, 0.0),
        (1.0, vocab, 0.9, 0.3),
    )  # fmt: skip
    kinds = ("plain", "ties", "half", "nan", "inf", "empty", "wide")
    logits, floats, ints = [], [], []
    for r, (temperature, top_k, top_p, min_p) in enumerate(settings):
        for nth, kind in enumerate(kinds):
            x = 3 * draw(vocab, dtype=torch.float32, seed=r)
            x = x.round() if kind == "ties" else 20 * x if kind == "wide" else x
            x[::2] = -torch.inf if kind in ("half", "empty") else x[::2]
            x[1::2] = -torch.inf if kind == "empty" else x[1::2]
            x[vocab // 2] = (
                torch.nan if kind == "nan" else torch.inf if kind == "inf" else x[vocab // 2]
            )
            logits.append(x)
            floats.append((temperature, top_p, math.log(min_p) if min_p else -math.inf))
            ints.append((top_k, 40 + r, nth, 0x89ABCDEF * (r + 1) & 0xFFFFFFFF, 7 * r))
    return (
        torch.stack(logits),
        torch.tensor(floats, dtype=torch.float64).to(DEVICE),
        torch.tensor(ints).to(DEVICE),
    )


@cell
def sampled_tokens_are_the_cpus() -> str:
    """Greedy, temperature, top-k, top-p, min-p; ties, -inf, +inf, NaN; vocabularies smaller and
    larger than a block, not multiples of 4."""
    said = ""
    for vocab, every in ((37, 3), (700, 10)):
        logits, floats, ints = (made[::every].contiguous() for made in sampling_rows(vocab))
        said += compare_tokens(f"V {vocab}", logits, floats, ints)
        pad = (logits[:2], torch.zeros_like(floats[:2]), torch.zeros_like(ints[:2]))
        said += compare_tokens(f"V {vocab}, what pads a step", *pad)
    return said


def compare_tokens(what: str, logits: Tensor, floats: Tensor, ints: Tensor) -> str:
    """Compares tokens and states with the CPU's."""
    want = host(lambda: CpuOps().sample_tokens(logits.cpu(), floats.cpu(), ints.cpu(), True))
    got = sample.sample_tokens(logits, floats, ints, cuts=True) if KERNELS else want
    pairs = zip(("tokens", "states"), got, want, strict=True)
    return "".join(equal(f"{what} {name}", a, b) for name, a, b in pairs)


def compare_logprobs(what: str, logits: Tensor, tokens: Tensor, few: int) -> str:
    """Compares log-probabilities with the CPU's, bit for bit."""
    want = host(lambda: CpuOps().compute_logprobs(logits.cpu(), tokens.cpu(), few))
    got = sample.compute_logprobs(logits, tokens, few) if KERNELS else want
    pairs = zip(("chosen", "ids", "best"), got, want, strict=True)
    return "".join(equal(f"{what} {name}", a, b) for name, a, b in pairs)


def equal(what: str, got: Tensor, want: Tensor) -> str:
    """Returns "" if all are equal (NaN equals NaN), or how many differ and the first pair."""
    differ = (got != want) & ~((got != got) & (want != want))
    if not differ.any():
        return ""
    first = int(differ.flatten().nonzero()[0])
    pair = f"{got.flatten()[first]} against {want.flatten()[first]}"
    return f"{what}: {int(differ.sum())} of {got.numel()}, the first {pair} at {first}; "


@cell
def log_probabilities_are_the_cpus() -> str:
    """The same bits, for a token and for the best few, in good rows and bad ones."""
    said = ""
    for vocab, few in ((37, 3), (700, 2)):
        logits = sampling_rows(vocab)[0][::5].contiguous()
        row = torch.arange(len(logits))
        tokens = torch.where(row % 4 == 0, -1, row * 5 % vocab).to(DEVICE)
        said += compare_logprobs(f"V {vocab}", logits, tokens, few)
    return said


def many_logits(first: int, count: int, vocab: int) -> Tensor:
    """Returns [count, vocab], about normal with a spread of 2, made of integers: the same on every
    machine. Every seventh row has ties, every eleventh is steep, every fifth lacks half of its
    tokens."""
    raw = np.random.Philox(key=[vocab, first]).random_raw(count * vocab).view(np.uint16)
    steps = raw.reshape(count, vocab, 4).sum(2, dtype=np.int32) - 131070
    x = torch.from_numpy(steps.astype(np.float32)).to(DEVICE) / 16384
    row = torch.arange(first, first + count, device=DEVICE)
    x = torch.where((row % 7 == 0)[:, None], x.round(), x)
    x = torch.where((row % 11 == 0)[:, None], x * 16, x)
    absent = (row % 5 == 0)[:, None] & (torch.arange(vocab, device=DEVICE) % 2 == 0)
    return x.masked_fill(absent, -torch.inf)


def large_vocabularies() -> str:
    """Thousands of rows with the sampler's own blocks: tokens and log-probabilities are the
    CPU's."""
    sample.BLOCK, sample.WIDE_BLOCK, sample.PARTS = map(tl.constexpr, (1024, 4096, 64))
    kinds = ((0.6, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0),
             (1.2, 0, 0.9, 0.0), (0.8, 40, 0.95, 0.0), (1.0, 0, 1.0, 0.05))  # fmt: skip
    said = ""
    for vocab, rows in ((151936, 1600), (50257, 1200), (32003, 1200), (129, 800)):
        for first in range(0, rows, 200):
            floats, ints = [], []
            for row in range(first, first + 200):
                temperature, top_k, top_p, min_p = kinds[row % len(kinds)]
                floats.append((temperature, top_p, math.log(min_p) if min_p else -math.inf))
                seed = 0x9E3779B9 * (row + 1)
                ints.append((top_k or vocab, row, row % 3, seed & 0xFFFFFFFF, seed >> 32))
            settings = torch.tensor(floats, dtype=torch.float64).to(DEVICE)
            logits = many_logits(first, 200, vocab)
            what = f"V {vocab} rows from {first}"
            said += compare_tokens(what, logits, settings, torch.tensor(ints).to(DEVICE))
            tokens = torch.arange(first, first + 200, device=DEVICE) * 7919 % vocab
            said += compare_logprobs(what, logits, tokens, 4)
    return said


def split_in_two(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """A library that splits K: two sums, added at the end."""
    half = x.shape[1] // 2
    parts = [
        gemm(x[:, at].contiguous(), w[:, at].contiguous(), torch.empty_like(y), TILES[0])
        for at in (slice(0, half), slice(half, None))
    ]
    return y.copy_(parts[0].float() + parts[1].float())


def aligned(rows: int, columns: int) -> Tensor:
    """Returns memory at a multiple of 256 bytes, as torch's device allocator gives it."""
    room = torch.empty(rows * columns + 128, dtype=torch.bfloat16, device=DEVICE)
    skip = -room.data_ptr() % gemm_choice.ALIGNMENT // 2
    return room[skip : skip + rows * columns].view(rows, columns)


@cell
def the_choice_of_a_gemm() -> str:
    """A library is chosen where all of its bits are ours, and only there; our tile elsewhere."""
    w = draw(40, 64)

    used = []

    def call(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        used.append(len(x))
        return split_in_two(x, w, y) if len(x) == 8 else gemm(x, w, y, TILES[1])

    def library(name: str, w: Tensor, rows: int) -> Any:
        return None if rows == 12 else call

    gemm_choice.LIBRARY_ROWS = 4
    chosen = gemm_choice.choose(w, library, grid=(1, 4, 8, 12, 16))
    said = "" if list(chosen) == [4, 16] else f"chosen for {list(chosen)} rows; "
    multiply = partial(gemm_choice.multiply, chosen)
    x, w, room = aligned(17, 64), aligned(40, 64), aligned(16, 40)
    x.copy_(draw(17, 64, seed=5)), w.copy_(draw(40, 64))
    used.clear()
    made = [multiply(x[:rows], w, room[:rows]).clone() for rows in (1, 4, 8, 16)]
    said += "" if used == [4, 16] else f"the library ran for {used} rows; "
    made.append(
        multiply(x[1:17], w, room).clone()[:-1]
    )  # at another alignment than the library was certified for: ours
    said += "" if used == [4, 16] else "the library ran on rows that lie otherwise; "
    for y in made[:-1]:
        said += same(y, made[3][: len(y)], f"{len(y)} rows")
    return said + same(made[-1], made[3][1:], "rows that lie otherwise")


@cell
def rows_outside_the_grid() -> str:
    """Row counts that no bucket has are computed by our tile; other dtypes, K and strides are
    errors."""
    x, w = draw(16, 64), draw(40, 64)
    y = torch.empty(3, 40, dtype=w.dtype, device=DEVICE)
    said = same(gemm_choice.multiply({}, x[:3], w, y), product(x, w, TILES[0])[:3], "three rows")
    attempts = {
        "K": lambda: gemm(draw(3, 48), w, y, TILES[0]),
        "dtype": lambda: gemm(draw(3, 64, dtype=torch.float16), w, y, TILES[0]),
        "stride": lambda: gemm(draw(3, 67)[:, :64], w, y, TILES[0]),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            said += f"{name}: no error; "
        except RuleError:
            pass
    return said


def tables() -> tuple[Any, Any]:
    """Returns the GPU's table, and the CPU's where it can be had."""
    from lockstep.kernels.cuda.ops import Ops

    return Ops("bfloat16"), None if PLAYED else CpuOps()


def compare(
    name: str, got: Tensor, make: Callable[[], Tensor], roundings: int = 1, size: float = 2.0**-6
) -> str:
    """Compares a bfloat16 result with the CPU's float32 one of the same operands. `roundings` is
    how often it was rounded; a rounded number is at most `size` larger than the result."""
    want = host(make)
    if got.shape != want.shape:
        return f"{name}: {tuple(got.shape)} against {tuple(want.shape)}; "
    unit = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-19
    return near(got, want, roundings * unit * (want.double().abs() + size), name)


@cell
def linear_operations() -> str:
    """linear, batched and in float32, with and without a bias; a whole layer of experts."""
    gpu, cpu_ops = tables()
    x, w, bias = draw(9, 64), draw(48, 64, seed=1), draw(48, seed=2)
    batch, weights = draw(9, 3, 64), draw(3, 40, 64, seed=1)
    said = ""
    for b in (None, bias):
        for dtype in (torch.bfloat16, torch.float32):
            packed = gpu.pack(w.to(dtype), None if b is None else b.to(dtype))
            got = gpu.linear(x.to(dtype), packed)
            make = partial(cpu_linear, cpu_ops, x, w, b)
            said += compare(f"linear {dtype}", got, make, 2, 4.0)
            said += "" if got.dtype == dtype else f"linear is {got.dtype}; "
    got = gpu.batched_linear(batch, gpu.pack(weights, None))
    packed = None if PLAYED else cpu_ops.pack(weights.cpu().float(), None)
    said += compare("batched", got, lambda: cpu_ops.batched_linear(batch.cpu().float(), packed))
    experts, biases = draw(6, 64, 64, seed=3), draw(6, 64, seed=4)
    logits, correction = (draw(*shape, dtype=torch.float32) for shape in ((9, 6), (6,)))
    for routing in (Routing(2, 6, norm=True), Routing(2, 6, "sigmoid", True, 0.0, 2.5, 3, 2)):
        fix = correction if routing.groups > 1 else None
        got = expert_layer(gpu, x, experts, biases, logits, routing, fix)
        wide = [t.cpu().float() for t in (x, experts, biases, logits)]
        fix = None if fix is None else fix.cpu()
        make = partial(expert_layer, cpu_ops, *wide, routing, fix)
        said += compare(routing.score, got, make, 8, 2.0)
    return said


def cpu_linear(ops: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the CPU's product of the operands, widened to float32."""
    packed = ops.pack(w.cpu().float(), None if bias is None else bias.cpu().float())
    return ops.linear(x.cpu().float(), packed)


def expert_layer(
    ops: Any, x: Tensor, w: Tensor, bias: Tensor, logits: Tensor, routing: Routing, fix: Any
) -> Tensor:
    """Sends rows to their experts, twice, and combines them."""
    routes = ops.route(logits, routing, fix)
    packed = ops.pack(w / 8, bias)
    parts = ops.grouped_linear(ops.dispatch(x, routes), packed, routes)
    return ops.combine(ops.grouped_linear(parts, packed, routes), routes)


@cell
def row_operations() -> str:
    """Every operation of the table on rows, in two and three dimensions."""
    gpu, cpu_ops = tables()
    own = {
        "x": draw(5, 112),
        "residual": draw(5, 112, seed=1),
        "heads": draw(5, 6, 32),
        "qkv": draw(5, 8 * 32),
        "weight": draw(112, dtype=torch.float32, seed=2),
        "bias": draw(112, dtype=torch.float32, seed=3),
        "norm": draw(32, dtype=torch.float32, seed=4),
        "qk": draw(2, 32, dtype=torch.float32, seed=5),
    }
    positions, freqs = torch.tensor([0, 1, 7, 40000, 131071]), torch.logspace(0, -4, 12)
    turn = gpu.rope_cos_sin(positions.int().to(DEVICE), freqs.to(DEVICE), 1.5)
    spec, spans = Heads(heads=4, kv_heads=2, d=32, eps=1e-6), [(0, 3), (3, 4), (1, 5)]
    wide = {name: t.cpu().float() for name, t in own.items()}
    flat = tuple(t.cpu() for t in turn)
    calls: dict[str, tuple[Callable[[Any, Any, Any], Any], int]] = {
        "rms_norm": (lambda o, t, _: o.rms_norm(t["x"], t["weight"], 1e-6), 1),
        "rms_norm of heads": (lambda o, t, _: o.rms_norm(t["heads"], t["norm"], 1e-6), 1),
        "add_rms_norm": (
            lambda o, t, _: o.add_rms_norm(t["x"], t["residual"], t["weight"], 1e-6)[1],
            4,
        ),
        "layer_norm": (lambda o, t, _: o.layer_norm(t["x"], t["weight"], t["bias"], 1e-5), 2),
        "rope": (lambda o, t, turn: o.rope(t["heads"], turn, False), 2),
        "rope interleaved": (lambda o, t, turn: o.rope(t["heads"], turn, True), 2),
        "qk_norm_rope q": (lambda o, t, turn: o.qk_norm_rope(t["qkv"], spec, t["qk"], turn)[0], 8),
        "qk_norm_rope k": (lambda o, t, turn: o.qk_norm_rope(t["qkv"], spec, None, turn)[1], 2),
        "clamped_swiglu": (lambda o, t, _: o.clamped_swiglu(t["x"], 1.702, 1.0), 2),
        "soft_cap": (lambda o, t, _: o.soft_cap(t["bias"][None], 2.0), 1),
        "pool": (lambda o, t, _: o.pool(t["x"], spans), 1),
    }
    for act in Activation:
        calls[f"activate {act}"] = (lambda o, t, _, act=act: o.activate(t["x"], act), 1)
        calls[f"act_and_mul {act}"] = (lambda o, t, _, act=act: o.act_and_mul(t["x"], act), 2)
    said = "".join(
        compare(name, call(gpu, own, turn), lambda c=call: c(cpu_ops, wide, CosSin(*flat)), count)
        for name, (call, count) in calls.items()
    )
    for name, got, nth in (("cos", turn.cos, 0), ("sin", turn.sin, 1)):
        want = host(lambda n=nth: cpu_ops.rope_cos_sin(positions.int(), freqs, 1.5)[n])
        said += near(got, want, 2.0**-22, name)
    return said


@cell
def cache_operations() -> str:
    """Written and moved keys have the CPU's bytes."""
    gpu, cpu_ops = tables()
    said, slots = "", torch.tensor([3, 0, 6, 9], dtype=torch.int32)
    moves = torch.tensor([[3, 1], [6, 3], [9, 11]], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        for d in (32, 24):
            values = 300 * draw(4, 2, d)
            room = [torch.zeros(12, 2, 32, dtype=dtype, device=DEVICE) for _ in range(2)]
            gpu.kv_write(room[0], slots.to(DEVICE), values, 0.5)
            gpu.kv_write(room[1], slots.to(DEVICE), -values, 0.5)
            gpu.kv_move(room, moves.to(DEVICE))
            want = host(lambda v=values, t=dtype: cpu_cache(cpu_ops, v.cpu(), t, slots, moves))
            if dtype == torch.float8_e4m3fn and DEVICE == "cpu":
                continue  # the interpreter rounds to it wrongly
            for a, b in zip(room, want, strict=True):
                bytes_differ = int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
                said += f"{dtype} {d}: {bytes_differ} bytes differ; " if bytes_differ else ""
    return said


@cell
def two_caches_at_one_address() -> str:
    """Keys of a cache move by its own row size, even if an earlier cache with wider rows was at the
    same address."""
    gpu, said = tables()[0], ""
    source, target = torch.tensor([[3, 1], [6, 3], [9, 11]], dtype=torch.int32, device=DEVICE).T
    memory = torch.randint(0, 120, (2, 12 * 128), dtype=torch.uint8, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        row = 64 * dtype.itemsize
        flat = [each[: 12 * row].view(12, row) for each in memory]
        want = [each.index_copy(0, target.long(), each[source.long()]) for each in flat]
        storages = [each.view(dtype).view(12, 2, 32) for each in flat]
        gpu.kv_move(storages, torch.stack((source, target), 1).contiguous())
        wrong = sum(int((a != b).sum()) for a, b in zip(flat, want, strict=True))
        said += f"{dtype}: {wrong} bytes differ; " if wrong else ""
    return said


def cpu_cache(
    ops: Any, values: Tensor, dtype: torch.dtype, slots: Tensor, moves: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns two storages, as the CPU writes and moves them."""
    room = tuple(torch.zeros(12, 2, 32, dtype=dtype) for _ in range(2))
    for storage, sign in zip(room, (1, -1), strict=True):
        ops.kv_write(storage, slots, sign * values.float(), 0.5)
    ops.kv_move(room, moves)
    return room


def an_engine_on_the_table() -> str:
    """A llama in the engine on device cuda, attention included: together and in chunks a request
    has the tokens and log-probability bits that it has alone. Not run where the CPU's kernels are
    missing."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from lockstep.attention import select as backends
    from lockstep.config import EngineConfig
    from lockstep.lab import tiny
    from lockstep.llm.engine import Engine, Parts
    from lockstep.models import loader
    from lockstep.sample.params import SamplingParams
    from lockstep.types import Choice

    def answers(prompts: list[tuple[int, ...]], **options: int) -> list[Any]:
        engine = Engine(EngineConfig(kv_cache_dtype="bfloat16", **options), made)
        params = SamplingParams(max_tokens=2, temperature=0.8, seed=3, logprobs=True)
        jobs = [engine.add(ids, params) for ids in prompts]
        while engine.busy:
            engine.step()
        outs = [job.output("") for job in jobs]
        return [(tuple(o.token_ids), np.array(o.logprobs, np.float32).tobytes()) for o in outs]

    with TemporaryDirectory() as folder:
        tiny.save(tiny.LLAMA, Path(folder))
        loaded = loader.load(Path(folder), EngineConfig(device="cuda"))
    backend, unproven = backends.load("triton"), "none"
    made = Parts(loaded.model, loaded.info, None, backend, Choice("triton", "the test's"), unproven)
    prompts = [tiny.words(n, n) for n in (3, 7)]
    want = [answers([ids], max_total_tokens=128)[0] for ids in prompts]
    got = answers(prompts, max_total_tokens=128, page_size=4, chunked_prefill_size=5)
    return "" if got == want else f"{got} against {want}"


if "--play" not in sys.argv:
    cell(an_engine_on_the_table)


@cell
def the_table_is_complete() -> str:
    """Every operation and field that `lockstep.ops.Ops` names exists."""
    from lockstep import ops

    gpu, _ = tables()
    names = {n for n in (*vars(ops.Ops), *ops.Ops.__annotations__) if not n.startswith("_")}
    missing = sorted(name for name in names if not hasattr(gpu, name))
    return f"missing: {missing}" if missing or len(names) < 20 else ""


@cell
def rows_of_odd_length() -> str:
    """Logits of a vocabulary that is no multiple of 8, and scores of few experts: each row has the
    bits that it has alone."""
    logits, scores, bias = (
        draw(*shape, dtype=torch.float32) for shape in ((5, 61), (5, 4), (4,))
    )  # rows begin at multiples of 61 and of 4 elements
    capped, added = rowwise.soft_cap(logits, 3.0), rowwise.add_bias(scores, bias)
    alone = [rowwise.soft_cap(row[None], 3.0) for row in logits]
    wrong = int((capped != torch.cat(alone)).sum()) + int((added != scores + bias).sum())
    off = float((capped - 3.0 * torch.tanh(logits / 3.0)).abs().max())
    return f"{wrong} differ, off by {off}" if wrong or off > 1e-5 else ""


@cell
def zero_rows() -> str:
    """No rows: no launch, no error, empty results."""
    x, w = draw(0, 64), draw(16, 64)
    made = (
        product(x, w, TILES[0]),
        rowwise.rms_norm(x, w[0].float(), 1e-6),
        rowwise.act_and_mul(x, "silu"),
        rowwise.add_bias(x, w[0]),
    )
    return "" if all(len(y) == 0 for y in made) else "rows out of nothing"


def main() -> None:
    global DEVICE, PLAYED
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cells", default="")
    parser.add_argument("--record")
    parser.add_argument("--play")
    args = parser.parse_args()
    DEVICE, PLAYED = args.device, bool(args.play)
    kept: dict[str, list[Any]] = torch.load(args.play) if args.play else {}
    found: dict[str, str] = {}
    cells = CELLS | {"large-vocabularies": large_vocabularies}
    for name in args.cells.split(",") if args.cells else CELLS:
        HOST[:] = kept.get(name, [])
        begin = time.process_time()
        try:
            found[name] = cells[name]()[:600]
        except Exception as error:
            if args.cells and not args.play:
                raise
            found[name] = f"{type(error).__name__}: {str(error)[:400]}"
        kept[name] = list(HOST)
        seconds = time.process_time() - begin
        print(f"{name}: {found[name] or 'held'} ({seconds:.1f} s of CPU)", file=sys.stderr)
    if args.record:
        torch.save(kept, args.record)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
