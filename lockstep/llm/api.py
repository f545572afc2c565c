"""`LLM` turns strings into tokens and generations into outputs; the engine does the rest.

Calls from several threads, and streams that are read alternately, are computed together. A call
that ends with an exception, such as an interrupt, drops its own requests and no others.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from lockstep.config import EngineConfig
from lockstep.llm import prompts as prompt_forms
from lockstep.llm.calls import Caller
from lockstep.llm.engine import Engine, load
from lockstep.llm.generation import Generation
from lockstep.llm.output import Chunk, Output
from lockstep.llm.prompts import Prompt
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError, format_value

Adds = Sequence[Callable[..., Generation]]  # each is called with `caller`


class LLM:
    """An engine with a model. The options are the fields of `EngineConfig`."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = EngineConfig.from_names({"model": model, **options})
        self.engine = Engine(config, load(config))

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Returns an LLM on an existing engine."""
        made = cls.__new__(cls)
        made.engine = engine
        return made

    @property
    def fingerprint(self) -> str:
        """What determines the answers' bits; it covers scores and embeddings too."""
        return self.engine.fingerprint

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_done: Callable[[], None] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[Output]:
        """Returns one output per prompt, in order. A prompt is a string or a list of token ids;
        params and `priority` (a higher one runs first, answers do not change) are for all or one
        each. `on_done` is called once per prompt, when its last completion ends (progress bars)."""
        many = prompt_forms.many(prompts)
        asked = prompt_forms.params_for(params, len(many))
        levels = prompt_forms.priorities_for(priority, len(many))
        if on_done is not None and not callable(on_done):
            rule = "on_done is called without arguments"
            raise RuleError(rule, format_value(on_done), "Pass a function, or leave it out")
        add, each = self.engine.add, zip(many, asked, levels, strict=True)
        adds = [partial(add, self._ids(p), wish, priority=level) for p, wish, level in each]
        return self._outputs(adds, on_done)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Generator[Chunk, None, None]:
        """Yields the text of one prompt as it is generated. Leaving the loop ends the request."""
        caller = Caller()
        chunks = self._stream(caller, prompt, params, priority)
        caller.follow(chunks)
        return chunks

    @overload
    def score(self, text: Prompt) -> NDArray[np.float32]: ...
    @overload
    def score(self, text: Prompt, items: Sequence[Prompt]) -> list[NDArray[np.float32]]: ...

    def score(
        self, text: Prompt, items: Sequence[Prompt] | None = None
    ) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Scores a text: returns float32 [tokens], each token's log-probability given those before
        it (NaN for the first), with the bits that generation would give. With `items`, one such
        array per item: its tokens given the text (an encoder-decoder's source), which is computed
        once, and the item's tokens before. Items are tokenised separately, without special
        tokens."""
        if items is not None:
            given = [self._ids(item, special=False) for item in prompt_forms.items(items)]
            (output,) = self._outputs([partial(self.engine.add_items, self._ids(text), given)])
            return [c.logprobs for c in output.completions if c.logprobs is not None]
        wish = SamplingParams(prompt_logprobs=True, seed=0)
        add = partial(self.engine.add, self._ids(text), wish, scores_only=True)
        (output,) = self._outputs([add])
        assert output.prompt_logprobs is not None, "prompt_logprobs was asked for"
        return output.prompt_logprobs

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> NDArray[np.float32]:
        """Embeds prompts, caching nothing: returns float32 [prompts, d_model], rows of length 1."""
        many, wish = prompt_forms.many(prompts), SamplingParams(seed=0)
        if not many:
            raise RuleError("there is a prompt to embed", "an empty list", "Pass at least one")
        adds = [partial(self.engine.add, self._ids(p), wish, embed=True) for p in many]
        generations = self._finished(adds)
        return np.stack([each.embedding for each in generations if each.embedding is not None])

    def _stream(
        self, caller: Caller, prompt: Prompt, params: SamplingParams | None, priority: int
    ) -> Generator[Chunk, None, None]:
        """Steps the engine only if there is no output yet: another call may have computed it."""
        try:
            ids = self._ids(prompt_forms.single(prompt))
            generation = self.engine.add(ids, params, priority=priority, caller=caller)
            done = False
            while not done:
                chunks, done = self.engine.new_chunks(generation)
                yield from chunks
                if not chunks and not done:
                    self.engine.step()
        finally:
            caller.close()

    def _outputs(self, adds: Adds, on_done: Callable[[], None] | None = None) -> list[Output]:
        return [each.output(self.fingerprint) for each in self._finished(adds, on_done)]

    def _finished(self, adds: Adds, on_done: Callable[[], None] | None = None) -> list[Generation]:
        """Adds requests and steps until all are done; they belong to this function's frame."""
        caller = Caller(sys._getframe())
        try:
            generations = [add(caller=caller) for add in adds]
            unfinished = generations
            while unfinished:
                self.engine.step()
                left = [generation for generation in unfinished if not generation.done]
                if on_done is not None:
                    for _ in range(len(unfinished) - len(left)):
                        on_done()
                unfinished = left
            return generations
        finally:
            caller.close()

    def _ids(self, prompt: Prompt, special: bool = True) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt  # the engine checks ids
        if self.engine.tokenizer is None:
            rule = "a text prompt needs a tokenizer"
            raise RuleError(rule, f"none in {self.engine.info.folder.name}", "Pass token ids")
        return self.engine.tokenizer.encode(prompt, special)
