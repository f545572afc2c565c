"""`lockstep bench kernels`: what our own kernels and shortcuts are worth, on and off in one run.

A switch is two ways to do the same work, with it and without it, alternating in one process. The
ratio is off over on: above 1 it pays. A shortcut of the host is disabled by patching in another
function. kernels.toml records what is done about each result. The clocks are those of `results`.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import chain
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.bench.contender import FULL, QUICK, Sizes, host_times, work
from lockstep.bench.results import Bench, Measure, called
from lockstep.bench.work import Ours
from lockstep.kernels.cpu import rows, threads
from lockstep.kernels.cpu.gemm import Panels
from lockstep.kernels.cpu.ops import Ops
from lockstep.lab import table
from lockstep.ops import Activation, CosSin, Heads
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import Row, RowBatch, settings
from lockstep.sched.request import Batch
from lockstep.types import RuleError

DONE = table("kernels.toml", "lockstep.bench")
EPS, OPS, BLOCK_S = 1e-6, Ops(), 0.15
COLUMNS, KEPT = (f"lockstep.sched.scheduler.Scheduler.{name}" for name in ("_until_len", "_batch"))
WORTH = "lockstep.kernels.cpu.threads.THREAD_NS"
Calls = tuple[str, str, Callable[[], object], Callable[[], object]]  # switch, case, on and off


def run(args: argparse.Namespace) -> int:
    """Measures every switch, prints a line each, writes JSON. Returns 1 if a run was disturbed."""
    chosen = [name for name in DONE if not args.case or name.startswith(tuple(args.case))]
    if not chosen:
        rule = f"--case is the beginning of a switch: {'; '.join(DONE)}"
        raise RuleError(rule, ", ".join(args.case), "Omit it for all switches")
    bench = Bench(args, runs=5)
    for name, case, on, off in switches(QUICK if args.quick else FULL):
        if name not in chosen:
            continue
        on(0), off(0)
        timing = bench.alternate({"lockstep": on, "off": off}).scaled(1e6)
        judged = bench.result(timing, "us", {})
        bench.add({"case": f"{name}: {case}", **judged, "more": {"done": DONE[name]}})
    bench.publish()
    return int(not args.quick and any(not c["undisturbed"] for c in bench.document["cases"]))


def switches(sizes: Sizes) -> Iterator[tuple[str, str, Measure, Measure]]:
    """Yields every switch with its two measures: kernel calls, then steps of the engine."""
    for t in (1, 64) if sizes.small else (1, 8, 64, 512):
        for name, case, on, off in chain(gemms(t), row_kernels(t), samplers(t)):
            yield name, f"{case}, {t} rows", called(on, BLOCK_S), called(off, BLOCK_S)
    one, every_call = partial(threads.limited, 1), partial(patch, WORTH, 1)
    for n in (1, 32):
        case, steps = f"a step of {n} requests", partial(step, sizes, n)
        yield "threads", case, within(nullcontext, steps), within(one, steps)
        yield "threads by work", case, within(nullcontext, steps), within(every_call, steps)
    case, host = f"host, {sizes.host[0]} requests", partial(host_s, sizes)
    for name, where, new in (
        ("columns", COLUMNS, lambda *_: 0),
        ("kept batch", KEPT, lambda _, builder: Batch(tuple(builder.rows))),
    ):
        yield name, case, within(nullcontext, host), within(partial(patch, where, new), host)


def within(
    state: Callable[[], AbstractContextManager[object]], measure: Callable[[], float]
) -> Measure:
    """Returns `measure`, run inside the context manager that `state` creates."""

    def measured(seed: int) -> float:
        with state():
            return measure()

    return measured


def noise(*shape: int) -> Tensor:
    """Returns random numbers, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def gemms(t: int) -> Iterator[Calls]:
    """Our GEMM against torch's, and against itself with float32 panels; the weights are bfloat16
    numbers."""
    for n, k in ((1280, 256), (4096, 768)):
        weight, x, case = noise(n, k).bfloat16().float(), noise(t, k), f"{k} -> {n}"
        packed = OPS.pack(weight, None)
        wide = Panels(packed.numbers.float(), packed.n)
        ours = partial(OPS.linear, x, packed)
        yield "gemm", case, ours, partial(functional.linear, x, weight)
        yield "bfloat16 panels", case, ours, partial(OPS.linear, x, wide)


def row_kernels(t: int) -> Iterator[Calls]:
    """Our row kernels against torch's operators, and fused ones against one call per operation."""
    x, residual, weight, norms = noise(t, 768), noise(t, 768), noise(768), noise(2, 64)
    qkv, up, turns = noise(t, 1280), noise(t, 4096), CosSin(noise(t, 32), noise(t, 32))
    q, k, v = qkv.view(t, 20, 64).split_with_sizes([12, 4, 4], 1)
    storage, slots = torch.zeros(16 * t, 4, 64), 16 * torch.arange(t, dtype=torch.int32)

    def turned(part: Tensor, weight: Tensor) -> Tensor:
        return rows.rope(rows.rms_norm(part, weight, EPS), turns, False)

    torch_norm = partial(functional.rms_norm, normalized_shape=[768], weight=weight, eps=EPS)
    add_norm = partial(OPS.add_rms_norm, x, residual, weight, EPS)
    gate = partial(OPS.act_and_mul, up, Activation.SILU)
    norm_rope = partial(OPS.qk_norm_rope, qkv, Heads(12, 4, 64, EPS), norms, turns)
    write = partial(OPS.kv_write, storage, slots, v, 1.0)
    yield "row kernels", "add + rms_norm", add_norm, lambda: torch_norm(x + residual)
    yield "row kernels", "silu_and_mul", gate, lambda: functional.silu(up[:, :2048]) * up[:, 2048:]
    yield "fused rows", "add + rms_norm", add_norm, lambda: rows.rms_norm(x + residual, weight, EPS)
    yield "fused rows", "qk-norm + rope", norm_rope, lambda: list(map(turned, (q, k), norms))
    yield "cache writes", "4 heads of 64", write, lambda: storage.index_copy_(0, slots.long(), v)


def samplers(t: int) -> Iterator[Calls]:
    """The compiled sampler against torch's operators, which have no seeds and no rule for ties."""
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=1)

    def tensors(logits: Tensor) -> Tensor:
        shares, ids = (logits / params.temperature).softmax(-1).sort(descending=True)
        kept = shares * (shares.cumsum(-1) - shares < params.top_p)
        return ids.gather(1, torch.multinomial(kept, 1))

    for vocab in (4096, 32_000) if t <= 64 else ():
        batch, logits = RowBatch.of([Row(params, i) for i in range(t)]), noise(t, vocab) * 3
        ours = partial(OPS.sample_tokens, logits, *settings(batch, vocab))
        yield "sampler", f"top-p of {vocab}", ours, partial(tensors, logits)


@cache
def engine() -> Ours:
    """Returns an engine with the built-in model."""
    return Ours(None, "cpu")


def step(sizes: Sizes, count: int) -> float:
    """Returns the seconds of a decode step of `count` requests."""
    many = work((96,) * count, (1,) * count, engine().vocab_size, 5).prompts
    engine().prime(many)
    return engine().step_s(many, sizes.steps)


def host_s(sizes: Sizes) -> float:
    """Returns the host's seconds in a decode step of many requests."""
    return float(host_times(engine(), sizes)["seconds"])
