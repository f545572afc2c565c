"""transformers, three ways: `generate` on one prompt, `generate` on a padded static batch, and its
continuous batching; fp32, sdpa, eager, greedy, no end token. Also the random llama that both sides
load. The only file of the benchmarks that imports transformers, and only when it is needed.
"""

import importlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lockstep.bench.work import Played, Tokens, Work
from lockstep.lab import table

TIE = 2e-4  # two logits closer than this may swap places between two correct fp32 implementations
WAIT_S = 900.0  # for one result of continuous batching

TABLE = table("peers.toml", "lockstep.bench")
Batching = dict[str, Any]  # settings of continuous batching


@contextmanager
def llama_folder(small: bool) -> Iterator[Path]:
    """A folder with a random llama, always the same one, as long as the block lasts."""
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
    """A streamer that notes when tokens came: first the prompt, then one call per step."""

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
        """One static batch; tokens beyond a request's own number do not count."""
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
        """Seconds per step of a static batch after its first token."""
        played = self.generate(Work(many, (steps + 1,) * len(many)))
        return (played.seconds - played.first_s) / steps

    @contextmanager
    def continuous(self, batching: Batching, work: Work) -> Iterator[Callable[[Work], Played]]:
        """What plays on a running manager with twice the cache that the work needs at once."""
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
        """How many requests got other tokens. A first difference is allowed only where two tokens
        are as good as equal."""
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
    """All requests at once on a running manager; an error of it is raised here."""
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
    """The library, without progress bars and warnings between the lines of a benchmark."""
    library: Any = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    return library
