"""The promise in one screen: one request computed in five ways, and one with draft tokens from the
built-in model's head: the same bits each time.

    python examples/same_bits.py

Uses the built-in model. Exits 1 if a single bit of a token or a log-probability differs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from time import perf_counter

from lockstep import LLM, SamplingParams
from lockstep.llm.output import Output

PROMPT = """import bisect


def contains(items, target):
    return target in items


def binary_search(items, target):
"""
PARAMS = SamplingParams(max_tokens=48, temperature=0.7, seed=7, logprobs=True)
GREEDY = replace(PARAMS, max_tokens=128, temperature=0)
ROOM = {"max_total_tokens": 8192, "context_length": 1024}


def preempted(llm: LLM) -> Output:
    """Preempts the request every other step; it is computed again from its tokens."""
    engine = llm.engine
    job, steps = engine.add(engine.tokenizer.encode(PROMPT), PARAMS), 0
    while engine.busy:
        engine.step()
        steps += 1
        if steps % 2 == 0 and job.request.running:
            engine.scheduler._preempt(job.request)
    return job.output(engine.fingerprint)


def timed(llm: LLM) -> tuple[Output, float, list[int]]:
    """Returns the output once everything is warm, its seconds, and each step's token count."""
    engine = llm.engine
    for _ in range(2):
        lens, begin = [0], perf_counter()
        job = engine.add(engine.tokenizer.encode(PROMPT), GREEDY)
        while engine.busy:
            engine.step()
            lens.append(len(job.completions[0].token_ids))
        seconds = perf_counter() - begin
    brought = [after - before for before, after in pairwise(lens)]
    return job.output(engine.fingerprint), seconds, brought


def same(one: Output, other: Output) -> bool:
    """Compares tokens and the bits of their log-probabilities."""
    tokens = one.token_ids == other.token_ids
    return tokens and one.logprobs.tobytes() == other.logprobs.tobytes()


def main() -> int:
    llm = LLM(**ROOM)
    (alone,) = llm.generate(PROMPT, PARAMS)
    print(f"\033[1m{PROMPT}\033[0m{alone.text}\n")
    (warm,) = llm.generate(PROMPT, PARAMS)
    others = [f"import module_{i}\n" + "x = 1\n" * i for i in range(15)]
    cold = LLM(**ROOM, disable_radix_cache=True)
    ways = {
        "in a batch of 16": cold.generate([*others[:7], PROMPT, *others[7:]], PARAMS)[7],
        f"with a warm cache ({warm.cached_tokens} tokens found)": warm,
        "chunked by 7": LLM(**ROOM, chunked_prefill_size=7, disable_radix_cache=True).generate(
            PROMPT, PARAMS
        )[0],
        f"preempted {PARAMS.max_tokens // 2} times": preempted(cold),
    }
    wrong = 0
    for name, out in ways.items():
        wrong += not same(out, alone)
        print(
            f"{'same bits' if same(out, alone) else 'DIFFERENT'}  {name}: {len(out.token_ids)} "
            f"tokens, {len(out.logprobs)} log-probabilities"
        )
    head = LLM(**ROOM, disable_radix_cache=True, speculative_algorithm="eagle3")
    (plain, plain_s, _), (guessed, seconds, brought) = timed(cold), timed(head)
    wrong += not same(plain, guessed)
    print(
        f"{'same bits' if same(plain, guessed) else 'DIFFERENT'}  at temperature 0, with the head: "
        f"{1e3 * seconds:.0f} ms, without it {1e3 * plain_s:.0f} ms\n"
        f"           tokens that its steps brought: {' '.join(map(str, brought))}"
    )
    print(f"\n{alone.fingerprint}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
