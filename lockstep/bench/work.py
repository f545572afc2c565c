"""The work of the benchmarks, and how each contender does it.

Lockstep: an engine as a user has it, driven as `LLM.generate` drives it. The prefix cache is on,
and no prompt is repeated unless a case is about that. transformers, three ways: `generate` on one
prompt, `generate` on a padded static batch, and its continuous batching; fp32, sdpa, eager, greedy,
no end token; imported only when needed. Also the random llama that both sides load.
"""

import importlib
import logging
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lockstep.config import EngineConfig
from lockstep.lab import table
from lockstep.llm.engine import Engine, load
from lockstep.llm.generation import Generation
from lockstep.sample.params import SamplingParams

Tokens = tuple[int, ...]
Batching = dict[str, Any]  # settings of transformers' continuous batching

CACHE_TOKENS = 65_536
FIRST_ID = 4  # smaller ids are special tokens in both models
TIE = 2e-4  # two logits closer than this may swap places between two correct fp32 implementations
WAIT_S = 900.0  # longest wait for one result of continuous batching
TABLE = table("work.toml", "lockstep.bench")


@dataclass(frozen=True)
class Work:
    prompts: tuple[Tokens, ...]
    news: tuple[int, ...]

    @property
    def new_tokens(self) -> int:
        return sum(self.news)

    def first(self, most: int) -> "Work":
        """Returns the same prompts with at most `most` new tokens each."""
        return replace(self, news=tuple(min(n, most) for n in self.news))


@dataclass(frozen=True)
class Played:
    """New tokens per prompt, seconds until every request had its first token and until the end, and
    keys found in the prefix cache."""

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
    """Returns the prompt lengths and new-token counts of the mixed case, always the same."""
    rng = random.Random(0)
    pairs = [(rng.randint(*ins), rng.randint(*outs)) for _ in range(count)]
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


class Ours:
    """An engine with one model. `model` is a folder, or None for the built-in one."""

    def __init__(self, model: str | None, device: str = "auto") -> None:
        self.config = EngineConfig(model=model, device=device, max_total_tokens=CACHE_TOKENS)
        self.parts = load(self.config)
        self.engine = Engine(self.config, self.parts)
        self.vocab_size = self.engine.info.vocab_size

    @cached_property
    def crowd(self) -> Engine:
        """An engine of the same model with room for 256 running requests."""
        return Engine(replace(self.config, max_running_requests=256), self.parts)

    def play(self, work: Work) -> Played:
        """Plays the work as one batch, greedy, to the requested lengths."""
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
        """Returns seconds per step while all of them decode; `prime` them first."""
        engine, slack = self.crowd, len(many) // 16 + 4  # requests that start first are a bit ahead
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


@contextmanager
def llama_folder(small: bool) -> Iterator[Path]:
    """Creates a folder with a random llama, always the same one, for the duration of the block."""
    library = transformers()
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape = TABLE["llama"] | (TABLE["small"] if small else {})
    config = library.LlamaConfig(**shape, **no_ids, tie_word_embeddings=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            library.LlamaForCausalLM(config).save_pretrained(folder)
        yield Path(folder)


class Clock(list[float]):
    """A streamer that notes when tokens arrive: first the prompt, then one call per step."""

    def put(self, value: object) -> None:
        self.append(perf_counter())

    def end(self) -> None:
        pass


class Peer:
    def __init__(self, folder: Path) -> None:
        options = {"dtype": torch.float32, "attn_implementation": "sdpa", "local_files_only": True}
        library = transformers().AutoModelForCausalLM
        self.model: Any = library.from_pretrained(str(folder), **options).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def generate(self, work: Work) -> Played:
        """Plays one static batch; tokens beyond a request's own number do not count."""
        wide, clock, begin = max(map(len, work.prompts)), Clock(), perf_counter()
        ids = torch.tensor([(0,) * (wide - len(p)) + p for p in work.prompts])
        mask = torch.tensor([[0] * (wide - len(p)) + [1] * len(p) for p in work.prompts])
        with torch.inference_mode():
            options = {"do_sample": False, "max_new_tokens": max(work.news), "streamer": clock}
            out = self.model.generate(ids, attention_mask=mask, **options)
        seconds = perf_counter() - begin
        rows = [tuple(row[:n]) for row, n in zip(out[:, wide:].tolist(), work.news, strict=True)]
        if (lens := tuple(map(len, rows))) != work.news:
            raise RuntimeError(f"transformers generated {lens} tokens instead of {work.news}")
        return Played(tuple(rows), clock[1] - begin, seconds)

    def step_s(self, many: tuple[Tokens, ...], steps: int) -> float:
        """Returns seconds per step of a static batch after its first token."""
        played = self.generate(Work(many, (steps + 1,) * len(many)))
        return (played.seconds - played.first_s) / steps

    @contextmanager
    def continuous(self, batching: Batching, work: Work) -> Iterator[Callable[[Work], Played]]:
        """Yields a function that plays work on a manager with twice the cache that `work` needs."""
        lens = [len(p) + n for p, n in zip(work.prompts, work.news, strict=True)]
        blocks = 2 * sum(-(-length // batching["page_size"]) for length in lens) + 2
        shape = batching | {"num_blocks": blocks, "allow_block_sharing": False}
        shape["auto_switch_to_flash"] = False
        ends = {"max_new_tokens": max(work.news), "eos_token_id": -1, "pad_token_id": 0}
        with self.model.continuous_batching_context_manager(
            generation_config=transformers().GenerationConfig(do_sample=False, **ends),
            continuous_batching_config=transformers().ContinuousBatchingConfig(**shape),
            warmup=False,
        ) as manager:
            yield partial(play_all, manager)

    def disagreements(self, work: Work, mine: Played, theirs: Played) -> int:
        """Counts requests with different tokens. A first difference is allowed only where the best
        two logits are nearly equal."""
        differing = 0
        for prompt, a, b in zip(work.prompts, mine.tokens, theirs.tokens, strict=True):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
            if at is None:
                continue
            differing += 1
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *a[:at]]])
                best, second = self.model(ids, logits_to_keep=1).logits[0, -1].topk(2).values
            gap = float(best - second)
            if gap >= TIE:
                told = f"new token {at} is {a[at]} and {b[at]}, the best two logits {gap:.2g} apart"
                raise RuntimeError(f"the contenders disagree: {told}")
        return differing


def play_all(manager: Any, work: Work) -> Played:
    """Plays all requests together on a running manager; its errors are raised here."""
    begin, done = perf_counter(), dict[str, Any]()
    add = partial(manager.add_request, eos_token_id=-1)
    asked = zip(work.prompts, work.news, strict=True)
    names = [add(list(p), max_new_tokens=n) for p, n in asked]
    while len(done) < len(names):
        result = manager.get_result(timeout=WAIT_S)
        if result is None or result.error is not None:
            error = manager.background_thread_status.fatal_error
            raise error or RuntimeError(result.error if result else "no result")
        if result.is_finished():
            done[result.request_id] = result
    seconds = perf_counter() - begin
    return Played(tuple(tuple(done[name].generated_tokens) for name in names), 0.0, seconds)


def transformers() -> Any:
    """Imports the library and silences its progress bars and warnings."""
    library: Any = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    return library
