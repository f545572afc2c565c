"""Random traces of a whole engine, every request compared with its lone run: tokens and
log-probabilities, bit for bit.

A trace is a tiny model, a hostile configuration (small pools, odd chunks, any page size) and a list
of arrivals and aborts. Requests are drawn from a fixed menu, so that each lone run is computed once
per process: alone, in a roomy engine without a prefix cache, its numbers judged by the plain
float64 model. A trace is a function of its number, so a failing one can be played again. `lockstep
lab fuzz` runs many, tests run some.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from lockstep.config import EngineConfig
from lockstep.lab.tiny import CONTEXT, QWEN3, VOCAB, checkpoint, loaded
from lockstep.lab.values import Values
from lockstep.llm.engine import Engine, Parts, prepare
from lockstep.llm.job import Job
from lockstep.llm.output import Output
from lockstep.sample.params import SamplingParams

MENU = 48  # different requests


@dataclass(frozen=True)
class Order:
    """One request of the menu."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass
class Trace:
    """What happens: the engine's configuration, and per step who arrives and who is aborted (by
    number of arrival)."""

    seed: int
    config: EngineConfig
    arrivals: list[tuple[int, int]]  # (step, number on the menu)
    aborts: dict[int, int]  # arrival -> step
    faults: list[str] = field(default_factory=list)


@lru_cache(maxsize=1)
def tiny() -> Parts:
    """The model with a window in one layer and none in the other, its rows proven on this
    machine."""
    return prepare(loaded(QWEN3), None)


def engine(**options: object) -> Engine:
    """An engine for the tiny model."""
    return Engine(EngineConfig.from_names({"context_length": CONTEXT, **options}), tiny())


@lru_cache(maxsize=1)
def menu() -> tuple[Order, ...]:
    """Requests that share prefixes of every length, with all kinds of parameters."""
    rng = random.Random(11)
    stems = [tuple(rng.randrange(1, VOCAB) for _ in range(n)) for n in (70, 40, 33, 16)]
    orders = []
    for i in range(MENU):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + tuple(
            rng.randrange(1, VOCAB) for _ in range(rng.choice((0, 1, 3, 9)))
        )
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


@lru_cache(maxsize=MENU)
def lone(number: int) -> Output:
    """The request by itself: no cache, no neighbours, room for everything."""
    alone = engine(disable_radix_cache=True, max_total_tokens=4096)
    job = alone.add(menu()[number].prompt, menu()[number].params)
    while alone.busy:
        alone.step()
    return job.output("")


@lru_cache(maxsize=MENU)
def lone_faults(number: int) -> tuple[str, ...]:
    """Where the numbers of the lone run are not the plain model's."""
    prompt, out = menu()[number].prompt, lone(number)
    values = Values(checkpoint(QWEN3))
    for c in out.completions:
        values.claim(
            (*prompt, *c.token_ids),
            len(prompt),
            c.logprobs if c.logprobs is not None else (),
            c.top_logprobs or (),
        )
    if out.prompt_logprobs is not None:
        values.claim(prompt, 1, out.prompt_logprobs[1:])
    return tuple(f"request {number} of the menu: {fault}" for fault in values.verdict().faults)


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
    return Trace(seed, config, arrivals, aborts)


def play(seed: int) -> tuple[list[str], Counter[str]]:
    """Runs a trace; what was wrong, and what happened in it."""
    trace = draw(seed)
    running = Engine(trace.config, tiny())
    jobs: list[Job] = []
    step = 0
    while len(jobs) < len(trace.arrivals) or running.busy:
        while len(jobs) < len(trace.arrivals) and trace.arrivals[len(jobs)][0] <= step:
            order = menu()[trace.arrivals[len(jobs)][1]]
            jobs.append(running.add(order.prompt, order.params))
        for i in [
            i
            for i, when in trace.aborts.items()
            if when == step and i < len(jobs) and not jobs[i].done
        ]:
            running.abort(jobs[i])
        running.step()
        step += 1
    running.check()
    found = [
        fault
        for i, job in enumerate(jobs)
        for fault in differences(f"trace {seed} request {i}", job, lone(trace.arrivals[i][1]))
    ]
    found += [fault for _, number in trace.arrivals for fault in lone_faults(number)]
    happened = Counter(running.scheduler.counters)
    happened.update(
        traces=1,
        requests=len(jobs),
        steps=step,
        tokens=sum(len(d.token_ids) for j in jobs for d in j.drafts),
    )
    happened["aborted"] += sum(draft.finish == "abort" for job in jobs for draft in job.drafts)
    return found, happened


def differences(who: str, job: Job, want: Output) -> list[str]:
    """Where a job is not what its lone run is; an aborted one must be a beginning of it."""
    out, found = job.output(""), []
    for mine, theirs in zip(out.completions, want.completions, strict=True):
        n = len(mine.token_ids)
        ended = mine.finish_reason != "abort"
        if mine.token_ids != theirs.token_ids[:n] or (
            ended and (n != len(theirs.token_ids) or mine.finish_reason != theirs.finish_reason)
        ):
            found.append(
                f"{who} completion {mine.index}: tokens {mine.token_ids} instead of "
                f"{theirs.token_ids}"
            )
        elif (
            mine.logprobs is not None
            and theirs.logprobs is not None
            and mine.logprobs.tobytes() != theirs.logprobs[:n].tobytes()
        ):
            found.append(f"{who} completion {mine.index}: log-probabilities differ in bits")
    if out.prompt_logprobs is not None and want.prompt_logprobs is not None:
        n = len(out.prompt_logprobs)
        if out.prompt_logprobs.tobytes() != want.prompt_logprobs[:n].tobytes():
            found.append(f"{who}: prompt log-probabilities differ in bits")
    return found


def play_some(seeds: range) -> tuple[list[str], Counter[str]]:
    """Several traces in one process; an error of the engine is a fault of its trace."""
    torch.set_num_threads(1)
    faults: list[str] = []
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            found, counts = play(seed)
        except (
            Exception
        ) as error:  # whatever it raises, the trace that does it is what we are looking for
            found, counts = [f"trace {seed}: {type(error).__name__}: {error}"], Counter(traces=1)
        faults += found
        happened.update(counts)
    return faults, happened
