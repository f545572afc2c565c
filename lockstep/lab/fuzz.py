"""Random traces of a whole engine, every request compared with its recomputation: tokens and
log-probabilities, bit for bit.

A trace is a hostile configuration (small pools, odd chunks, any page size) of one tiny model, and a
list of arrivals and aborts. Requests are drawn from a fixed menu, so that each is recomputed once
per process, its numbers judged by the plain float64 model. A trace is a function of its number, so
a failing one can be played again; what is switched on in it (`SWITCHES`) follows from its number
too, and from nothing else, so that old numbers keep their arrivals. `lockstep lab fuzz` runs many,
tests run some.
"""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from itertools import combinations as subsets_of

import torch

from lockstep.attention import select
from lockstep.config import EngineConfig
from lockstep.lab import document, isolate
from lockstep.lab.engine_harness import EngineHarness
from lockstep.lab.options import CPU, Device, RunOptions
from lockstep.lab.recompute import Order
from lockstep.lab.speculative import CHAIN, EAGLE, EAGLE3, EAGLE3_TREE, NGRAM, TREE
from lockstep.lab.tiny import CONTEXT, QWEN3, VOCAB, loaded
from lockstep.llm.engine import Engine, Parts, prepare
from lockstep.progress import Progress
from lockstep.sample.params import SamplingParams

MENU = 48  # different requests
# each on in half of the traces, independently: rows and requests that are padding; several buckets;
# steps that are settled when the next one has been launched
SWITCHES = ("padding", "buckets", "late settling")
NOTHING = "nothing switched on"
DRAFTS = (NGRAM, CHAIN, TREE, EAGLE, EAGLE3, EAGLE3_TREE)  # of half of all requests
GUESSED = ("accepted_drafts", "rejected_drafts")  # in each hundred traces
SHRINK = 200  # smaller traces that are tried
RECORDED = 16  # buckets; on a GPU more are not captured ahead
TASK_S = 600.0  # ten traces that take longer have hung

Played = tuple[list[str], Counter[str]]  # what was wrong, and what happened


@dataclass(frozen=True)
class Trace:
    """What happens: the engine's configuration, and who arrives and leaves when."""

    config: EngineConfig
    arrivals: tuple[tuple[int, int], ...]  # (step, number on the menu), by step
    aborts: dict[int, int]  # arrival -> step
    switches: tuple[str, ...]
    guessed: frozenset[int] = frozenset()  # arrivals that speculate

    def orders(self) -> list[Order]:
        """As the rig takes them."""
        out = []
        for i, (step, number) in enumerate(self.arrivals):
            order = menu()[number]
            params = replace(order.params, speculative=i in self.guessed)
            out.append(replace(order, params=params, at=step, abort=self.aborts.get(i)))
        return out


@lru_cache(maxsize=1)
def tiny() -> Parts:
    """The model with a window in one layer and none in the other, proven on this machine."""
    return prepare(loaded(QWEN3), None)


def engine(**options: object) -> Engine:
    return Engine(EngineConfig.from_names({"context_length": CONTEXT, **options}), tiny())


@lru_cache(maxsize=1)
def rig(backend: str = "cpu", device: Device = CPU) -> EngineHarness:
    """One per process: it remembers what every request of the menu comes to."""
    return EngineHarness(QWEN3, select.load(backend), RunOptions(device=device))


def drawn(rng: random.Random, count: int) -> tuple[int, ...]:
    """So many tokens."""
    return tuple(rng.randrange(1, VOCAB) for _ in range(count))


@lru_cache(maxsize=1)
def menu() -> tuple[Order, ...]:
    """Requests that share prefixes of every length, with all kinds of parameters."""
    rng = random.Random(11)
    stems, orders = [drawn(rng, n) for n in (70, 40, 33, 16)], list[Order]()
    for i in range(MENU):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + drawn(rng, rng.choice((0, 1, 3, 9)))
        params = SamplingParams(
            max_tokens=rng.choice((1, 2, 5, 12, 24)),
            temperature=rng.choice((0.0, 0.7, 1.3)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 12)),
            seed=i,
            n=rng.choice((1, 1, 1, 3)),
            logprobs=2,
            prompt_logprobs=rng.choice((None, None, 0)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
            stop_token_ids=rng.choice(((), (7,))),
        )
        orders.append(Order(prompt, params))
    return tuple(orders)


def draw(seed: int) -> Trace:
    """Trace number `seed`."""
    rng = random.Random(seed)
    page = rng.choice((1, 2, 4, 16))
    config = EngineConfig(
        page_size=page,
        chunked_prefill_size=rng.choice((3, 7, 16, 64, 512)),
        disable_radix_cache=rng.random() < 0.2,
        max_running_requests=rng.choice((1, 2, 4, 16)),
        max_total_tokens=rng.choice((112, 128, 160, 1000)),
        context_length=CONTEXT,
    )
    arrivals = sorted(
        (int(rng.expovariate(0.15)), rng.randrange(MENU)) for _ in range(rng.randint(2, 12))
    )
    aborts = {
        i: step + rng.randint(0, 20) for i, (step, _) in enumerate(arrivals) if rng.random() < 0.15
    }
    coin = random.Random(f"switches of {seed}")
    on = tuple(name for name in SWITCHES if coin.random() < 0.5)
    coin = random.Random(f"speculation of {seed}")
    guessed = frozenset(i for i in range(len(arrivals)) if coin.random() < 0.5)
    config = replace(config, **coin.choice(DRAFTS))
    return Trace(switched(config, on), tuple(arrivals), aborts, on, guessed)


def switched(config: EngineConfig, on: tuple[str, ...]) -> EngineConfig:
    """The configuration with these switches on. Buckets without padding are of every size."""
    most = max(config.chunked_prefill_size, config.max_running_requests)
    powers = [2**k for k in range(most.bit_length()) if 2**k < most]
    every, padded = tuple(range(1, most + 1)), (*powers, most) if "buckets" in on else (most,)
    sizes = padded if "padding" in on else every if "buckets" in on else None
    return replace(config, bucket_sizes=sizes)


def combinations() -> list[str]:
    """What may be switched on in a trace, in words."""
    subsets = chain(*(subsets_of(SWITCHES, n) for n in range(len(SWITCHES) + 1)))
    return [" + ".join(chosen) or NOTHING for chosen in subsets]


def play(seed: int, backend: str = "cpu", device: Device = CPU) -> Played:
    """Runs a trace; what was wrong, and what happened in it. A failing one is shrunk."""
    trace = draw(seed)
    found, happened = run(trace, rig(backend, device))
    if found:
        less = shrunk(trace, rig(backend, device))
        found.append(f"fewer arrivals fail as well: {less.arrivals}, aborts {less.aborts}")
    return [f"trace {seed} {fault}" for fault in found], happened


def run(trace: Trace, mine: EngineHarness) -> Played:
    """One trace; an error of the engine is a fault of it."""
    mine.faults, mine.counters, mine.drafted = {}, Counter(), {}
    late, config = "late settling" in trace.switches, trace.config
    if len(config.bucket_sizes or ()) > RECORDED:
        config = replace(config, graphs=False)
    mine.play("trace", mine.engine_of(config, late), trace.orders())
    found = [fault for faults in mine.faults.values() for fault in faults]
    found += [f"value: {fault}" for fault in mine.values.verdict().faults]
    happened = Counter(traces=1) + mine.counters
    happened[" + ".join(trace.switches) or NOTHING] += 1
    return found, happened


def shrunk(trace: Trace, mine: EngineHarness) -> Trace:
    """The fewest arrivals and aborts that still fail, as far as they are found."""
    from hypothesis import find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    count = len(trace.arrivals)

    def part(keep: list[bool]) -> Trace:
        kept = [i for i in range(count) if keep[i]]
        aborts = {
            at: trace.aborts[i]
            for at, i in enumerate(kept)
            if i in trace.aborts and keep[count + i]
        }
        guessed = frozenset(at for at, i in enumerate(kept) if i in trace.guessed)
        arrivals = tuple(trace.arrivals[i] for i in kept)
        return replace(trace, arrivals=arrivals, aborts=aborts, guessed=guessed)

    flags = st.lists(st.booleans(), min_size=2 * count, max_size=2 * count)
    options = settings(max_examples=SHRINK, database=None, deadline=None)
    try:
        return part(find(flags, lambda keep: bool(run(part(keep), mine)[0]), settings=options))
    except NoSuchExample:
        return trace


def play_some(seeds: range, backend: str, device: Device) -> Played:
    """Several traces in one process."""
    torch.set_num_threads(1)
    played = [play(seed, backend, device) for seed in seeds]
    return [fault for faults, _ in played for fault in faults], sum(
        (n for _, n in played), Counter()
    )


def command(args: Namespace) -> int:
    """`lab fuzz`: ten traces a task, in processes that may die."""
    begin, last = time.perf_counter(), args.first + args.traces
    device = Device.of(args.device, args.dtype)
    some = partial(play_some, backend=args.backend, device=device)
    tasks = [range(i, min(i + 10, last)) for i in range(args.first, last, 10)]
    faults, happened, hundreds = list[str](), Counter[str](), dict[int, Counter[str]]()
    with Progress(len(tasks), "lab fuzz") as bar:
        for task, answer in isolate.run(some, tasks, max(1, args.workers), lambda _: TASK_S):
            if isinstance(answer, isolate.Died):
                answer = [f"traces {task.start} to {task.stop - 1}: {answer.reason}"], Counter()
            faults += answer[0]
            happened.update(answer[1])
            hundreds.setdefault(task.start // 100, Counter()).update(answer[1])
            bar.step(f"{happened['traces']} traces", bool(answer[0]))
    least = {name: min(each[name] for each in hundreds.values()) for name in GUESSED}
    if args.traces >= 100:
        faults += [f"{name}: {count} in some hundred" for name, count in least.items() if not count]
    doc = {
        **{**document.head(), "device": asdict(device)},
        "least_in_a_hundred": least,
        **{"first": args.first, "traces": args.traces, "differing": len(faults)},
        "faults": faults[:100],
        "switches": {name: happened.pop(name, 0) for name in combinations()},
        "happened": dict(happened),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    document.publish(args, doc, document.text("fuzz.txt", doc=doc))
    return 1 if faults else 0
