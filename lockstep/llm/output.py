"""The results: one `Output` per prompt, one `Completion` per sample. Log-probabilities are float32
arrays under the model's own distribution, before temperature."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Top = tuple[tuple[int, float], ...]  # (token id, log-probability) of the best tokens, best first


class Speculated(NamedTuple):
    """Speculation counts of a text: tokens drafted, those accepted, and steps that verified."""

    drafted: int = 0
    accepted: int = 0
    verify_steps: int = 0


NOT_SPECULATED = Speculated()


@dataclass(frozen=True, eq=False)
class Completion:
    """One generated text. `finish_reason` is length, stop, abort or error (see `error`)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: Floats | None = None  # [len(token_ids)] of the chosen tokens
    top_logprobs: tuple[Top, ...] | None = None
    error: str = ""
    speculated: Speculated = NOT_SPECULATED


@dataclass(frozen=True, eq=False)
class Output:
    """The answer to one prompt. text, token_ids, ... are those of the first completion."""

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    seed: int | None  # a request repeated with it gives the same answer
    cached_tokens: int  # prompt tokens whose keys were found in the cache
    fingerprint: str
    # [len(prompt_token_ids)] NaN for the first, which nothing predicts
    prompt_logprobs: Floats | None = None
    prompt_top_logprobs: tuple[Top, ...] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> Floats | None:
        """Log-probabilities of the chosen tokens: returns float32 [len(token_ids)]."""
        return self.completions[0].logprobs

    @property
    def top_logprobs(self) -> tuple[Top, ...] | None:
        return self.completions[0].top_logprobs

    @property
    def speculated(self) -> Speculated:
        """The counts of all completions together."""
        return Speculated(*map(sum, zip(*(c.speculated for c in self.completions), strict=True)))

    @property
    def finish_reason(self) -> str:
        return self.completions[0].finish_reason


@dataclass(frozen=True)
class Chunk:
    """An item of a stream: more text of one completion. The last has a finish_reason."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
