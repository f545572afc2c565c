"""What the contenders are given, and Lockstep's own way of doing it: an engine as a user has it,
driven as `LLM.generate` drives it. The prefix cache is on, and no prompt comes twice unless a case
is about that.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

from lockstep.config import EngineConfig
from lockstep.llm.engine import Engine, load
from lockstep.llm.generation import Generation
from lockstep.sample.params import SamplingParams

Tokens = tuple[int, ...]

CACHE_TOKENS = 65_536
FIRST_ID = 4  # ids below it have a meaning of their own in both models


@dataclass(frozen=True)
class Work:
    prompts: tuple[Tokens, ...]
    news: tuple[int, ...]

    @property
    def new_tokens(self) -> int:
        return sum(self.news)

    def first(self, most: int) -> "Work":
        """The same prompts with at most so many new tokens."""
        return replace(self, news=tuple(min(n, most) for n in self.news))


@dataclass(frozen=True)
class Played:
    """New tokens per prompt, seconds until all had their first one and until the end, and keys
    found in the prefix cache."""

    tokens: tuple[Tokens, ...]
    first_s: float
    seconds: float
    cached: tuple[int, ...] = ()


def prompts(lens: Sequence[int], vocab_size: int, seed: int) -> tuple[Tokens, ...]:
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(FIRST_ID, vocab_size) for _ in range(n)) for n in lens)


def mixed_lens(
    count: int, ins: tuple[int, int], outs: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of prompts and numbers of new tokens of the mixed case: always the same ones."""
    rng = random.Random(0)
    pairs = [(rng.randint(*ins), rng.randint(*outs)) for _ in range(count)]
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


class Ours:
    """An engine with one model. `model` is a folder, or None for the built-in one."""

    def __init__(self, model: str | None, device: str = "auto") -> None:
        self.config = EngineConfig(model=model, device=device, max_total_tokens=CACHE_TOKENS)
        self.parts = load(self.config)
        self.engine = Engine(self.config, self.parts)

    @cached_property
    def crowd(self) -> Engine:
        """The same model with room for 256 running requests."""
        return Engine(replace(self.config, max_running_requests=256), self.parts)

    @property
    def vocab_size(self) -> int:
        return self.engine.info.vocab_size

    def play(self, work: Work) -> Played:
        """All of it as one batch, greedy, to the asked length."""
        begin, first_s = perf_counter(), 0.0
        jobs = _add(self.engine, work)
        while self.engine.busy:
            self.engine.step()
            if not first_s and all(job.completions[0].token_ids for job in jobs):
                first_s = perf_counter() - begin
        seconds = perf_counter() - begin
        tokens = tuple(tuple(job.completions[0].token_ids) for job in jobs)
        return Played(tokens, first_s, seconds, tuple(job.request.hit_len or 0 for job in jobs))

    def prime(self, many: tuple[Tokens, ...]) -> None:
        """Puts the prompts into the prefix cache that `step_s` uses."""
        _add(self.crowd, Work(many, (1,) * len(many)))
        while self.crowd.busy:
            self.crowd.step()

    def step_s(self, many: tuple[Tokens, ...], steps: int) -> float:
        """Seconds per step while all of them decode; `prime` them first."""
        engine, slack = self.crowd, len(many) // 16 + 4  # those that start first are a bit ahead
        jobs = _add(engine, Work(many, (steps + slack,) * len(many)))
        try:
            while not all(job.completions[0].token_ids for job in jobs):
                engine.step()
            begin = perf_counter()
            for _ in range(steps):
                engine.step()
            seconds = perf_counter() - begin
            assert not any(job.done for job in jobs), "a request ended while it was measured"
        finally:
            for job in jobs:
                engine.abort(job)
        return seconds / steps


def _add(engine: Engine, work: Work) -> list[Generation]:
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)
    pairs = zip(work.prompts, work.news, strict=True)
    return [engine.add(prompt, replace(greedy, max_tokens=n)) for prompt, n in pairs]
