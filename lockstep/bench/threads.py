"""`lockstep bench threads`: engines beside other threads of the process, on more or fewer cores.

Two engines in two threads: do they keep their bits, and how fast are they together? A thread that
runs nothing but Python beside a long prefill: how much of its speed is left? One request and many
on 1, 2, 4, ... threads. `cli` calls `run`; a test compares the bits of fewer requests.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from lockstep.bench.machine import Timing, alternate, note, place, set_threads
from lockstep.bench.work import Ours, prompts
from lockstep.lab.document import publish, text
from lockstep.llm.api import LLM
from lockstep.llm.output import Output
from lockstep.sample.params import SamplingParams

REQUESTS, QUICK_REQUESTS = 500, 20
TOGETHER, BESIDE = 0.9, 0.5  # least share of one engine's speed, and of Python's
ALL_THREADS, SPEED_UP, CROWD = 1.05, 6.0, 64  # most of the best time; least of one thread's speed
PREFILL_LEN, BESIDE_S = 2000, 1.0
KEYS = 800  # of a request in the steps that are timed
Result = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Measures all three; prints, writes JSON. Returns 1 if bits differ or a target was missed."""
    count, runs = set_threads(args.threads), args.repeat or (1 if args.quick else 3)
    llms = [_llm() for _ in range(2)]
    tries = 0 if args.quick else 2
    two = two_engines(llms, QUICK_REQUESTS if args.quick else REQUESTS, runs, tries)
    beside = beside_prefill(llms[0], runs, tries)
    grid = scaling(runs, tries, 8 if args.quick else 64)
    met = not two["differing"] and two["ratio"] >= TOGETHER and beside["ratio"] >= BESIDE
    if count >= 16:
        met = met and grid["all_to_best"] <= ALL_THREADS and grid["speed_up"] >= SPEED_UP
    doc: Result = {"environment": place(count), "quick": args.quick, "met": met}
    doc |= {"two_engines": two, "beside_prefill": beside, "scaling": grid}
    limits = {"together": TOGETHER, "beside": BESIDE, "crowd": CROWD}
    limits |= {"all_threads": ALL_THREADS, "speed_up": SPEED_UP}
    publish(args, doc, text("threads.txt", "lockstep.bench", doc=doc, limits=limits))
    return int(not args.quick and not met)


def _llm() -> LLM:
    """The built-in model on the CPU, where nothing is found in a cache."""
    return LLM(device="cpu", disable_radix_cache=True, max_total_tokens=16_384)


def answers(llm: LLM, count: int) -> list[Output]:
    """Of `count` requests, every other one sampled."""
    rng = random.Random(count)
    ids = prompts([rng.randint(8, 96) for _ in range(count)], llm.engine.info.vocab_size, 1)
    asked = [
        SamplingParams(
            max_tokens=rng.randint(4, 24), temperature=float(i % 2), logprobs=True, seed=i
        )
        for i in range(count)
    ]
    return llm.generate([list(each) for each in ids], asked)


def bits(outputs: Sequence[Output]) -> list[tuple[object, ...]]:
    """Tokens and the bits of their log-probabilities."""
    return [(o.token_ids, b"" if o.logprobs is None else o.logprobs.tobytes()) for o in outputs]


def two_engines(llms: Sequence[LLM], count: int, runs: int, tries: int) -> Result:
    """One alone, then both at once, each with all the requests."""
    want = answers(llms[0], count)
    tokens, differing = sum(len(o.token_ids) for o in want), list[int]()

    def rate(who: Sequence[LLM]) -> Callable[[int], float]:
        def measure(_: int) -> float:
            begin = time.perf_counter()
            with ThreadPoolExecutor(len(who)) as pool:
                found = list(pool.map(lambda llm: answers(llm, count), who))
            seconds = time.perf_counter() - begin
            for each in found:
                pairs = zip(bits(each), bits(want), strict=True)
                differing.append(sum(have != wanted for have, wanted in pairs))
            return len(who) * tokens / seconds

        return measure

    timing = alternate({"one": rate(llms[:1]), "two": rate(llms)}, runs, note, tries)
    return {
        "requests": count,
        "tokens": tokens,
        "differing": sum(differing),
        "ratio": round(timing.median("two") / timing.median("one"), 3),
        **_timing(timing, "tokens_per_second"),
    }


def beside_prefill(llm: LLM, runs: int, tries: int) -> Result:
    """Loops of Python per second, alone and beside prefills; and what the prefills lose. Both have
    run before anything counts, and take turns."""
    ids = [list(prompts((PREFILL_LEN,), llm.engine.info.vocab_size, 3)[0])]
    one = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    prefills = {"alone": list[float](), "beside": list[float]()}

    def prefill(kind: str) -> None:
        begin = time.perf_counter()
        llm.generate(ids, one)
        prefills[kind].append(time.perf_counter() - begin)

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
    timing = alternate({"alone": alone, "beside": beside}, max(runs, 3), note, tries)
    medians = {kind: statistics.median(times) for kind, times in prefills.items()}
    return {
        "ratio": round(timing.median("beside") / timing.median("alone"), 3),
        "prefill_ratio": round(medians["alone"] / medians["beside"], 3),
        "prefill_s": {kind: round(value, 4) for kind, value in medians.items()},
        **_timing(timing, "loops_per_second"),
    }


def loops() -> float:
    """Pure Python: additions per second."""
    begin, n = time.perf_counter(), 0
    while n % 1024 or time.perf_counter() - begin < BESIDE_S:
        n += 1
    return n / (time.perf_counter() - begin)


def scaling(runs: int, tries: int, steps: int) -> Result:
    """Milliseconds of a decode step of one request and of CROWD, of some 850 keys each, by the
    number of threads."""
    ours, all_threads = Ours(None, "cpu"), torch.get_num_threads()
    counts = sorted({2**i for i in range(all_threads.bit_length())} | {all_threads})

    def medians(requests: int) -> tuple[dict[int, float], Timing]:
        (common,) = prompts((KEYS,), ours.vocab_size, 11)
        ends = prompts((16,) * requests, ours.vocab_size, 12)
        many = tuple((*common, *end) for end in ends)
        ours.prime(many)

        def with_threads(n: int) -> Callable[[int], float]:
            def measure(_: int) -> float:
                torch.set_num_threads(n)
                try:
                    return 1e3 * ours.step_s(many, steps)
                finally:
                    torch.set_num_threads(all_threads)

            return measure

        timing = alternate({str(n): with_threads(n) for n in counts}, runs, note, tries)
        return {n: round(timing.median(str(n)), 3) for n in counts}, timing

    (alone, timing), (crowd, crowd_timing) = medians(1), medians(CROWD)
    return {
        "alone_ms": alone,
        "crowd_ms": crowd,
        "all_to_best": round(alone[all_threads] / min(alone.values()), 3),
        "speed_up": round(crowd[1] / crowd[all_threads], 2),
        "undisturbed": timing.undisturbed and crowd_timing.undisturbed,
        "runs": {"alone": timing.runs, "crowd": crowd_timing.runs},
    }


def _timing(timing: Timing, unit: str) -> Result:
    return {unit: timing.runs, "undisturbed": timing.undisturbed, "others": timing.others}
