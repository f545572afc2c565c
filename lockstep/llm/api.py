"""`LLM`: a model in five lines.

    from lockstep import LLM, SamplingParams
    llm = LLM()                                        # the built-in model; or a folder, or a hub id
    out = llm.generate(["def fib(n):"], SamplingParams(max_tokens=32, temperature=0.8, seed=7, logprobs=True))
    out[0].text, out[0].token_ids, out[0].logprobs, out[0].fingerprint

Turns strings into tokens and jobs into outputs; the engine does the rest. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lockstep.config import EngineConfig
from lockstep.llm import prompts as prompt_forms
from lockstep.llm.engine import Engine, load
from lockstep.llm.job import Job
from lockstep.llm.output import Chunk, Output
from lockstep.llm.prompts import Prompt
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError


class LLM:
    """An engine with a model. Options are those of `EngineConfig`: page_size, chunked_prefill_size, disable_radix_cache, ..."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = EngineConfig.from_names({"model": model, **options})
        self.engine = Engine(config, load(config))

    @property
    def fingerprint(self) -> str:
        """What computes the answers: every output carries it, and it holds for scores and embeddings too."""
        return self.engine.fingerprint

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> list[Output]:
        """One output per prompt, in order. A prompt is a string or a list of token ids; params are for all or one for each.

        `on_done` is called once per prompt, when its last completion has ended: for progress bars.
        """
        many = prompt_forms.many(prompts)
        return self._outputs(self._add(many, prompt_forms.params_for(params, len(many))), on_done)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """The text of one prompt as it comes. Leaving the loop early ends the request."""
        (job,) = self._add([prompt_forms.single(prompt)], prompt_forms.params_for(params, 1))
        try:
            while not job.done:
                self.engine.step()
                yield from job.news()
        finally:
            if not job.done:
                self.engine.abort(job)

    @overload
    def score(self, text: Prompt) -> NDArray[np.float32]: ...
    @overload
    def score(self, text: Prompt, items: Sequence[Prompt]) -> list[NDArray[np.float32]]: ...

    def score(self, text: Prompt, items: Sequence[Prompt] | None = None) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Log-probability of every token of a text given those before it (NaN for the first): the bits generation would give.

        With `items`: of every token of each item, given the text and the item's tokens before it. The text is computed once and each
        item is a fork of it; for an encoder-decoder it is the source. Items are tokenised by themselves, without special tokens.
        """
        if items is not None:
            ids = [self._ids(item, special=False) for item in prompt_forms.items(items)]
            (output,) = self._outputs([self.engine.add_items(self._ids(text), ids)])
            return [c.logprobs for c in output.completions if c.logprobs is not None]
        (output,) = self._outputs([self.engine.add(self._ids(text), SamplingParams(prompt_logprobs=True, seed=0), scores_only=True)])
        assert output.prompt_logprobs is not None, "prompt_logprobs was asked for"
        return output.prompt_logprobs

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> NDArray[np.float32]:
        """[n, d] float32 of length 1, without touching the cache."""
        many = prompt_forms.many(prompts)
        if not many:
            raise RuleError("there is a prompt to embed", "an empty list", "Pass at least one")
        jobs = self._add(many, [SamplingParams(seed=0)] * len(many), embed=True)
        self._finish(jobs)
        return np.stack([job.embedding for job in jobs if job.embedding is not None])

    def _add(self, prompts: list[Prompt], params: Sequence[SamplingParams], embed: bool = False) -> list[Job]:
        """All prompts or, if one is refused, none."""
        jobs: list[Job] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                jobs.append(self.engine.add(self._ids(prompt), each, embed=embed))
        except BaseException:
            for job in jobs:
                self.engine.abort(job)
            raise
        return jobs

    def _outputs(self, jobs: list[Job], on_done: Callable[[], None] | None = None) -> list[Output]:
        self._finish(jobs, on_done)
        return [job.output(self.engine.fingerprint) for job in jobs]

    def _finish(self, jobs: list[Job], on_done: Callable[[], None] | None = None) -> None:
        open_jobs = len(jobs)
        try:
            while open_jobs:
                self.engine.step()
                left = sum(not job.done for job in jobs)
                for _ in range(open_jobs - left if on_done else 0):
                    on_done()  # type: ignore[misc]
                open_jobs = left
        finally:
            for job in jobs:
                if not job.done:
                    self.engine.abort(job)

    def _ids(self, prompt: Prompt, special: bool = True) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt  # the engine checks ids
        if self.engine.tokenizer is None:
            raise RuleError("a text prompt needs a tokenizer", f"none in {self.engine.info.folder.name}", "Pass token ids")
        return self.engine.tokenizer.encode(prompt, special)
