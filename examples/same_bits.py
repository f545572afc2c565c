"""The promise in one screen: one request, five ways to compute it, the same bits each time.

    python examples/same_bits.py

Uses the built-in model. Exits 1 if a single bit of a token or a log-probability differs.
"""

from __future__ import annotations

import sys

from lockstep import LLM, SamplingParams
from lockstep.llm.output import Output

PROMPT = """import bisect


def contains(items, target):
    return target in items


def binary_search(items, target):
"""
PARAMS = SamplingParams(max_tokens=48, temperature=0.7, seed=7, logprobs=True)
ROOM = {"max_total_tokens": 8192, "context_length": 1024}


def preempted(llm: LLM) -> Output:
    """Takes the request's pages away every other step; it is computed again from its tokens."""
    engine = llm.engine
    job, steps = engine.add(engine.tokenizer.encode(PROMPT), PARAMS), 0
    while engine.busy:
        engine.step()
        steps += 1
        if steps % 2 == 0 and job.request.running:
            engine.scheduler._preempt(job.request)
    return job.output(engine.fingerprint)


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
        same = (
            out.token_ids == alone.token_ids and out.logprobs.tobytes() == alone.logprobs.tobytes()
        )
        wrong += not same
        print(
            f"{'same bits' if same else 'DIFFERENT'}  {name}: {len(out.token_ids)} tokens, "
            f"{len(out.logprobs)} log-probabilities"
        )
    print(f"\n{alone.fingerprint}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
