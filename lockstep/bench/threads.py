"""`lockstep bench threads`: engines beside other threads of the process, on more or fewer cores.

Two engines in two threads: do they keep their bits, and how fast are they together? A thread of
pure Python beside a long prefill: how much of its speed is left? Decode steps of one request and of
many, on 1, 2, 4, ... threads. `cli` calls `run`; a test compares the bits of fewer requests.
"""

import argparse
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter

import torch

from lockstep.bench.results import Bench, Measure, Result
from lockstep.bench.work import Ours, prompts
from lockstep.llm.api import LLM
from lockstep.llm.engine import Engine
from lockstep.llm.output import Output
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError

REQUESTS, QUICK_REQUESTS = 500, 20
TOGETHER, BESIDE = 0.9, 0.5  # least ratio to one engine's speed, and to Python's alone
ALL_THREADS, SPEED_UP, CROWD = 0.952, 6.0, 64  # least ratio to each count, to one thread; requests
MANY_CORES = 16  # scaling is judged from this many threads on
PREFILL_LEN, BESIDE_S = 2000, 1.0
KEYS = 800  # about the keys of a request in timed steps


def run(args: argparse.Namespace) -> int:
    """Measures everything, prints, writes JSON. Returns 1 if a target was missed or not judged."""
    bench = Bench(args, tries=2)
    llms = [LLM(device="cpu", disable_radix_cache=True, max_total_tokens=16_384) for _ in range(2)]
    requests, steps = (QUICK_REQUESTS, 8) if args.quick else (REQUESTS, 64)
    bench.add(two_engines(llms, requests, bench))
    bench.add(beside_prefill(llms[0], bench))
    bench.add(scaling(1, steps, bench))
    bench.add(scaling(CROWD, steps, bench))
    return bench.publish()


def answers(llm: LLM, count: int) -> list[Output]:
    """Returns the outputs of `count` requests, every other one sampled."""
    rng = random.Random(count)
    ids = prompts([rng.randint(8, 96) for _ in range(count)], llm.engine.info.vocab_size, 1)
    asked = [
        SamplingParams(max_tokens=rng.randint(4, 24), temperature=i % 2.0, logprobs=True, seed=i)
        for i in range(count)
    ]
    return llm.generate([list(each) for each in ids], asked)


def bits(outputs: Sequence[Output]) -> list[tuple[object, ...]]:
    """Returns tokens and the bits of their log-probabilities, per output."""
    return [(o.token_ids, b"" if o.logprobs is None else o.logprobs.tobytes()) for o in outputs]


def two_engines(llms: Sequence[LLM], count: int, bench: Bench) -> Result:
    """Tokens per second: one engine, two that share weights (judged), two with a copy each."""
    one, copy = llms
    twin = LLM.of(Engine(one.engine.config, one.engine.parts))
    want, *_ = [answers(each, count) for each in (one, twin, copy)]
    tokens = sum(len(o.token_ids) for o in want)

    def rate(llms: Sequence[LLM]) -> Measure:
        def measure(_: int) -> float:
            begin = perf_counter()
            with ThreadPoolExecutor(len(llms)) as pool:
                found = list(pool.map(lambda llm: answers(llm, count), llms))
            seconds = perf_counter() - begin
            for each in found:
                pairs = zip(bits(each), bits(want), strict=True)
                if differing := sum(have != wanted for have, wanted in pairs):
                    got = f"{differing} of {count} answers differ"
                    raise RuleError("two threads change no bit", got, "Report it")
            return len(llms) * tokens / seconds

        return measure

    who = {"one": [one], "lockstep": [one, twin], "copies": [one, copy]}
    timing = bench.alternate({name: rate(llms) for name, llms in who.items()})
    more = {"requests": count, "tokens": tokens, "differing": 0}
    return {
        "case": "two engines",
        **bench.result(timing, "tokens per second", {"one": TOGETHER}),
        "more": more,
    }


def beside_prefill(llm: LLM, bench: Bench) -> Result:
    """Loops of Python per second, alone and beside prefills, and the prefills' own times. Both are
    warmed up, and alternate."""
    ids = [list(prompts((PREFILL_LEN,), llm.engine.info.vocab_size, 3)[0])]
    one = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    prefills = {"alone": list[float](), "beside": list[float]()}

    def prefill(kind: str) -> None:
        begin = perf_counter()
        llm.generate(ids, one)
        prefills[kind].append(perf_counter() - begin)

    def alone(_: int) -> float:
        prefill("alone")
        return loops()

    def beside(_: int) -> float:
        done = threading.Event()

        def go_on() -> None:
            while not done.is_set():
                prefill("beside")

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            return loops()
        finally:
            done.set()
            thread.join()

    alone(0), beside(0)
    for times in prefills.values():
        times.clear()
    timing = bench.alternate({"alone": alone, "lockstep": beside})
    judged = bench.result(timing, "loops per second", {"alone": BESIDE})
    medians = {kind: round(median(times), 4) for kind, times in prefills.items()}
    return {"case": "Python beside a prefill", **judged, "more": {"prefill_s": medians}}


def loops() -> float:
    """Returns the additions per second of a pure Python loop."""
    begin, n = perf_counter(), 0
    while n % 1024 or perf_counter() - begin < BESIDE_S:
        n += 1
    return n / (perf_counter() - begin)


def scaling(requests: int, steps: int, bench: Bench) -> Result:
    """Milliseconds of a decode step, some 850 keys per request, by the number of threads; ours uses
    all of them and is judged if there are many."""
    ours, all_threads = Ours(None, "cpu"), torch.get_num_threads()
    (common,) = prompts((KEYS,), ours.vocab_size, 11)
    ends = prompts((16,) * requests, ours.vocab_size, 12)
    many = tuple((*common, *end) for end in ends)
    ours.prime(many)

    def with_threads(n: int) -> Measure:
        def measure(_: int) -> float:
            torch.set_num_threads(n)
            try:
                return 1e3 * ours.step_s(many, steps)
            finally:
                torch.set_num_threads(all_threads)

        return measure

    counts = [2**i for i in range(all_threads.bit_length()) if 2**i < all_threads]
    others = {f"{n} threads": with_threads(n) for n in counts}
    timing = bench.alternate({**others, "lockstep": with_threads(all_threads)})
    targets = {"1 threads": SPEED_UP}
    if requests == 1:
        targets = dict.fromkeys(others, ALL_THREADS)
    if all_threads < MANY_CORES:
        targets = {}
    judged = bench.result(timing, "ms per step", targets)
    return {"case": f"a step of {requests} requests", **judged}
