"""`lockstep bench kernels`: what our own kernels and short cuts are worth, on and off in one run.

A switch is two ways to do the same work, with it and without it, which alternate in one process;
the ratio is off over on: above 1 it pays. A short cut of the host is taken out by putting another
function in its place meanwhile; one that is no longer there is listed as gone. `DONE` says what
was decided. Knows what is compared; clocks are `machine`'s.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.bench.contender import FULL, QUICK, Sizes, host_times, work
from lockstep.bench.machine import Measure, alternate, block, note, place, set_threads, tell
from lockstep.bench.work import Ours
from lockstep.kernels.cpu import threads
from lockstep.kernels.cpu.ops import Ops
from lockstep.lab.document import write
from lockstep.ops import Activation, CosSin, Heads
from lockstep.sample import logits, sampler
from lockstep.sample.logits import Row
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import Batch

DONE = {
    "gemm": "kept: the one GEMM here whose rows do not depend on their company",
    "row kernels": "kept: torch's sums and exponentials depend on the width of the vectors",
    "threads": "",
    "threads by work": "",
    "sampler": "",
    "steady_until_len": "",
    "kept batch": "",
}
EPS, OPS = 1e-6, Ops()
STEADY = ("sched.scheduler:Scheduler._steady_until_len",)
KEPT = ("sched.scheduler:Scheduler._batch_of",)
WORTH = ("kernels.cpu.threads:THREAD_NS",)


@dataclass(frozen=True)
class Switch:
    """What is compared: seconds with it and without it."""

    name: str
    case: str
    on: Measure
    off: Measure


@dataclass(frozen=True)
class Switched:
    """What was found: medians in microseconds, 0 if the switch is gone, and every run."""

    switch: str
    case: str
    on_us: float
    off_us: float
    ratio: float
    undisturbed: bool
    done: str
    runs: dict[str, list[float]]

    def __str__(self) -> str:
        times = f"{self.on_us:10.1f} {self.off_us:10.1f} us  x{self.ratio:5.2f}"
        disturbed = "" if self.undisturbed else "  disturbed"
        found = times if self.on_us else f"{'gone':>32}"
        return f"{self.switch:16} {self.case:28} {found}{disturbed}  {self.done}"


def run(args: argparse.Namespace) -> int:
    """Measures every switch; prints a table, writes JSON. Returns 1 if a run was disturbed."""
    count, results = set_threads(args.threads), list[Switched]()
    for switch in switches(QUICK if args.quick else FULL):
        if not args.case or any(switch.name.startswith(case) for case in args.case):
            results.append(measure(switch, args))
            tell(str(results[-1]))
    found = [asdict(result) for result in results]
    if args.json:
        document = {"environment": place(count), "quick": args.quick, "switches": found}
        write(document, args.json)
    if args.json != "-":
        print("\n".join(map(str, results)))
    return int(not args.quick and any(not r.undisturbed for r in results))


def measure(switch: Switch, args: argparse.Namespace) -> Switched:
    """Both sides by turns."""
    gone = Switched(switch.name, switch.case, 0.0, 0.0, 0.0, True, DONE[switch.name], {})
    runs, tries = (args.repeat or 1, 0) if args.quick else (args.repeat or 5, 3)
    try:
        switch.on(0), switch.off(0)  # warms, and finds what is gone
    except Gone:
        return gone
    timing = alternate({"on": switch.on, "off": switch.off}, runs, note, tries)
    on, off = timing.median("on"), timing.median("off")
    return Switched(
        switch=switch.name,
        case=switch.case,
        on_us=round(1e6 * on, 2),
        off_us=round(1e6 * off, 2),
        ratio=round(off / on, 3),
        undisturbed=timing.undisturbed,
        done=DONE[switch.name],
        runs=timing.runs,
    )


def switches(sizes: Sizes) -> Iterator[Switch]:
    """All of them: calls of kernels, then steps of the engine."""
    for t in (1, 64) if sizes.small else (1, 8, 64, 512):
        for name, calls in (
            ("gemm", gemms(t)),
            ("row kernels", row_kernels(t)),
            ("sampler", samplers(t)),
        ):
            for case, (on, off) in calls.items():
                yield Switch(name, f"{case}, {t} rows", called(on), called(off))
    one, nobody = partial(threads.limited, 1), partial(replaced, WORTH, 1)
    for n in (1, 32):
        case, steps = f"a step of {n} requests", partial(step, sizes, n)
        yield Switch("threads", case, within(nullcontext, steps), within(one, steps))
        yield Switch("threads by work", case, within(nullcontext, steps), within(nobody, steps))
    case, host = f"host, {sizes.host[0]} requests", partial(host_s, sizes)
    for name, off in (
        ("steady_until_len", partial(replaced, STEADY, lambda *_: 0)),
        ("kept batch", partial(replaced, KEPT, lambda _, rows: Batch(rows))),
    ):
        yield Switch(name, case, within(nullcontext, host), within(off, host))


def called(call: Callable[[], object]) -> Measure:
    """The median of many calls."""
    return lambda seed: statistics.median(block(call, 0.15 if seed else 0.0))


def within(
    state: Callable[[], AbstractContextManager[None]], measure: Callable[[], float]
) -> Measure:
    """Measured while something is in force."""

    def measured(seed: int) -> float:
        with state():
            return measure()

    return measured


# ---- calls ----

Pair = tuple[Callable[[], object], Callable[[], object]]


def noise(*shape: int) -> Tensor:
    """Random numbers, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def gemms(t: int) -> dict[str, Pair]:
    """Our GEMM against torch's, in fp32, with weights that are bfloat16 numbers."""
    found: dict[str, Pair] = {}
    for n, k in ((1280, 256), (4096, 768)):
        weight, x = noise(n, k).bfloat16().float(), noise(t, k)
        ours = partial(OPS.linear, x, OPS.pack(weight, None))
        found[f"{k} -> {n}"] = (ours, partial(functional.linear, x, weight))
    return found


def row_kernels(t: int) -> dict[str, Pair]:
    """Sum and norm, norm and rotation of heads, gate: our kernels against torch's operators."""
    x, residual, weight, norms = noise(t, 768), noise(t, 768), noise(768), noise(2, 64)
    qkv, up, cos_sin = noise(t, 1280), noise(t, 4096), CosSin(noise(t, 32), noise(t, 32))

    def rotated(part: Tensor, weight: Tensor) -> Tensor:
        a, b = functional.rms_norm(part, [64], weight, EPS).chunk(2, -1)
        c, s = cos_sin.cos[:, None], cos_sin.sin[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    def qk_norm_rope() -> tuple[Tensor, Tensor]:
        q, k = qkv[:, :768].view(t, 12, 64), qkv[:, 768:1024].view(t, 4, 64)
        return rotated(q, norms[0]), rotated(k, norms[1])

    return {
        "add + rms_norm": (
            partial(OPS.add_rms_norm, x, residual, weight, EPS),
            lambda: functional.rms_norm(x + residual, [768], weight, EPS),
        ),
        "qk-norm + rope": (
            partial(OPS.qk_norm_rope, qkv, Heads(12, 4, 64, EPS), norms, cos_sin),
            qk_norm_rope,
        ),
        "silu_and_mul": (
            partial(OPS.act_and_mul, up, Activation.SILU),
            lambda: functional.silu(up[:, :2048]) * up[:, 2048:],
        ),
    }


def samplers(t: int) -> dict[str, Pair]:
    """The compiled sampler against the same choice written with tensors."""
    found: dict[str, Pair] = {}
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
    for vocab in (4096, 32_000) if t <= 64 else ():
        how = sampler.settings([Row(params, i) for i in range(t)], vocab)
        args = (noise(t, vocab) * 3, how.floats, how.ints, how.cuts)
        ours = partial(OPS.sample_tokens, *args)
        found[f"top-p of {vocab}"] = (ours, partial(logits.sample_tokens, *args))
    return found


# ---- steps ----


@cache
def engine() -> Ours:
    """The built-in model."""
    return Ours(None)


def step(sizes: Sizes, count: int) -> float:
    """Seconds of a decode step."""
    many = work((96,) * count, (1,) * count, engine().vocab_size, 5).prompts
    engine().prime(many)
    return engine().step_s(many, sizes.steps)


def host_s(sizes: Sizes) -> float:
    """Seconds of the host in a decode step of many requests."""
    return float(host_times(engine(), sizes)["seconds"])


class Gone(Exception):
    """There is nothing to switch off."""


@contextmanager
def replaced(names: Sequence[str], new: object) -> Iterator[None]:
    """The first of these that there is, "module:path" each, is `new` in the block."""
    for name in names:
        module, _, path = name.partition(":")
        owner: Any = importlib.import_module(f"lockstep.{module}")
        *classes, attribute = path.split(".")
        for each in classes:
            owner = getattr(owner, each)
        if attribute in vars(owner):
            old = vars(owner)[attribute]
            setattr(owner, attribute, new)
            try:
                yield
            finally:
                setattr(owner, attribute, old)
            return
    raise Gone(f"none of {', '.join(names)} is there")
