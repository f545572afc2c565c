"""Random traces of a whole engine: every request is compared with its recomputation, tokens and
log-probabilities, bit for bit.

A trace is a hostile configuration of one tiny model and a list of arrivals and aborts, a function
of its number. Its switches, and the clock by which half of the traces choose their draft depth, are
drawn separately, so that old numbers keep their arrivals. Requests are taken from a fixed menu, so
each is recomputed once per process. `lockstep lab fuzz` runs many, tests run some.
"""

import random
import time
from argparse import Namespace
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, count
from types import SimpleNamespace
from unittest.mock import patch

from lockstep.attention import select
from lockstep.config import EngineConfig
from lockstep.lab import document, isolate, table
from lockstep.lab.engine_harness import EngineHarness
from lockstep.lab.options import CPU, Device, RunOptions
from lockstep.lab.recompute import StoryRequest
from lockstep.lab.speculative import CHAIN, EAGLE, EAGLE3, EAGLE3_TREE, NGRAM, TREE
from lockstep.lab.tiny import CONTEXT, QWEN3, VOCAB
from lockstep.progress import Progress
from lockstep.sample.params import SamplingParams

MENU = 48  # number of different requests
PARAMS = table("fuzz_requests.json")["params"]
# each on in half of the traces, independently: padding rows and requests; several buckets; steps
# settled after the next one was launched
SWITCHES = ("padding", "buckets", "late settling")
DRAFTS = (NGRAM, CHAIN, TREE, EAGLE, EAGLE3, EAGLE3_TREE)  # for half of all requests
GUESSED = ("accepted_drafts", "rejected_drafts")  # must occur in each hundred traces
SHRINK = 200  # how many smaller traces are tried
RECORDED = 16  # with more buckets than this, a GPU captures no graphs
TRACE_S = 600.0  # a trace that takes longer, shrinking included, has hung

Played = tuple[list[str], Counter[str]]  # faults, and counters of what happened


@dataclass(frozen=True)
class Trace:
    """The engine's configuration, and which requests arrive and abort when."""

    config: EngineConfig
    orders: tuple[StoryRequest, ...]  # by step; an order's seed is its number on the menu
    switches: tuple[str, ...]
    adaptive: bool  # draft depth adapts, by a clock that is drawn


@lru_cache(maxsize=1)
def rig(backend: str = "cpu", device: Device = CPU) -> EngineHarness:
    """Returns this process's harness, which remembers the answer of every request on the menu."""
    return EngineHarness(QWEN3, select.load(backend), RunOptions(device=device))


def drawn(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCAB) for _ in range(count))


@lru_cache(maxsize=1)
def menu() -> tuple[StoryRequest, ...]:
    """Returns requests that share prefixes of every length, with all kinds of parameters."""
    rng = random.Random(11)
    stems, orders = [drawn(rng, n) for n in (70, 40, 33, 16)], list[StoryRequest]()
    for i in range(MENU):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + drawn(rng, rng.choice((0, 1, 3, 9)))
        given = {name: rng.choice(choices) for name, choices in PARAMS.items()}
        params = SamplingParams.from_dict({**given, "seed": i, "logprobs": 2})
        orders.append(StoryRequest(prompt, params))
    return tuple(orders)


def draw(seed: int) -> Trace:
    """Returns trace number `seed`."""
    rng = random.Random(seed)
    config = EngineConfig(
        page_size=rng.choice((1, 2, 4, 16)),
        chunked_prefill_size=rng.choice((3, 7, 16, 64, 512)),
        disable_radix_cache=rng.random() < 0.2,
        max_running_requests=rng.choice((1, 2, 4, 16)),
        max_total_tokens=rng.choice((112, 128, 160, 1000)),
        context_length=CONTEXT,
    )
    arrivals = sorted(
        (int(rng.expovariate(0.15)), rng.randrange(MENU)) for _ in range(rng.randint(2, 12))
    )
    orders = [replace(menu()[number], at=step) for step, number in arrivals]
    coin = random.Random(f"switches of {seed}")
    on = tuple(name for name in SWITCHES if coin.random() < 0.5)
    coin = random.Random(f"speculation of {seed}")
    for i, order in enumerate(orders):
        guessed = replace(order.params, speculative=coin.random() < 0.5)
        orders[i] = replace(order, params=guessed)
        if rng.random() < 0.15:
            orders[i] = replace(orders[i], abort=order.at + rng.randint(0, 20))
    config = replace(config, **coin.choice(DRAFTS))
    return Trace(switched(config, on), tuple(orders), on, adaptive=coin.random() < 0.5)


def switched(config: EngineConfig, on: tuple[str, ...]) -> EngineConfig:
    """Returns the configuration with these switches on. Buckets without padding have every size."""
    most = max(config.chunked_prefill_size, config.max_running_requests)
    powers = [2**k for k in range(most.bit_length()) if 2**k < most]
    sizes: tuple[int, ...] | None = tuple(range(1, most + 1)) if "buckets" in on else None
    if "padding" in on:
        sizes = (*powers, most) if "buckets" in on else (most,)
    return replace(config, bucket_sizes=sizes)


def play(seed: int, backend: str = "cpu", device: Device = CPU) -> Played:
    """Runs a trace and returns its faults and counters. A failing one is shrunk."""
    trace = draw(seed)
    found, happened = run(trace, rig(backend, device))
    if found:
        less = [(o.at, o.params.seed, o.abort) for o in shrunk(trace, rig(backend, device)).orders]
        found.append(f"a smaller failing trace, (step, menu number, abort): {less}")
    return [f"trace {seed} {fault}" for fault in found], happened


def run(trace: Trace, mine: EngineHarness) -> Played:
    """Runs one trace on `mine`; an exception of the engine is a fault."""
    mine.faults, mine.counters, mine.drafted = {}, Counter(), {}
    late, config = "late settling" in trace.switches, trace.config
    if mine.device != CPU and len(config.bucket_sizes or ()) > RECORDED:
        config = replace(config, graphs=False)
    rng = random.Random(5)
    clock = partial(next, accumulate(rng.expovariate(1.0) for _ in count()))
    with patch("lockstep.spec.speculation.time", SimpleNamespace(perf_counter=clock)):
        mine.play("trace", mine.engine_of(config, late, trace.adaptive), trace.orders)
    mine.note("value", mine.values.verdict().faults)
    happened = Counter(traces=1, adaptive_traces=trace.adaptive) + mine.counters
    happened[f"with {' + '.join(trace.switches) or 'nothing switched on'}"] += 1
    return mine.fault_lines(), happened


def shrunk(trace: Trace, mine: EngineHarness) -> Trace:
    """Returns the smallest failing part of the trace that was found."""
    from hypothesis import find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    count = len(trace.orders)

    def part(keep: list[bool]) -> Trace:
        orders = []
        for order, stays, aborts in zip(trace.orders, keep[:count], keep[count:], strict=True):
            if stays and aborts:
                orders.append(order)
            elif stays:
                orders.append(replace(order, abort=None))
        return replace(trace, orders=tuple(orders))

    flags = st.lists(st.booleans(), min_size=2 * count, max_size=2 * count)
    options = settings(max_examples=SHRINK, database=None, deadline=None)
    try:
        return part(find(flags, lambda keep: bool(run(part(keep), mine)[0]), settings=options))
    except NoSuchExample:
        return trace


def command(args: Namespace) -> int:
    """Runs `lab fuzz`, in worker processes that may die."""
    begin, seeds = time.perf_counter(), range(args.first, args.first + args.traces)
    device = Device.of(args.device, args.dtype)
    play_one = partial(play, backend=args.backend, device=device)
    faults, hundreds = list[str](), defaultdict[int, Counter[str]](Counter)
    with Progress(len(seeds), "lab fuzz") as bar:
        for seed, answer in isolate.run(play_one, seeds, args.workers, lambda _: TRACE_S):
            if isinstance(answer, isolate.Died):
                answer = [f"trace {seed}: {answer.reason}"], Counter[str]()
            found, counted = answer
            faults += found
            hundreds[seed // 100].update(counted)
            bar.step(f"trace {seed}", bool(found))
    happened = sum(hundreds.values(), Counter[str]())
    least = {name: min(each[name] for each in hundreds.values()) for name in GUESSED}
    if args.traces >= 100:
        faults += [f"{name} is 0 in a hundred traces" for name, count in least.items() if not count]
    doc = {
        **document.head(),
        **{"device": asdict(device), "least_in_a_hundred": least},
        **{"first": args.first, "traces": args.traces, "differing": len(faults)},
        "faults": faults[:100],
        "switches": {k: happened.pop(k) for k in sorted(happened) if k.startswith("with ")},
        "happened": dict(happened),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    document.publish(args, doc, document.text("fuzz.txt", doc=doc))
    return int(bool(faults))
