"""One prompt on its way: what was asked, and what has come out so far, per completion.

A `Draft` grows by one token at a time: the text that is certain, the log-probabilities, and why it ended. `Job.output` freezes all of it.
Knows tokens and text; the engine feeds it, the surface reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lockstep.llm.output import Chunk, Completion, Output, Top
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import Request, Token
from lockstep.text.detok import Piece, Stream
from lockstep.text.tokenizer import Tokenizer


@dataclass
class Scores:
    """Log-probabilities of tokens in order, and the best tokens beside each."""

    chosen: list[float] = field(default_factory=list)
    best: list[Top] = field(default_factory=list)

    def add(self, logprob: float, best: Top) -> None:
        self.chosen.append(logprob)
        self.best.append(best)


class Draft:
    """A completion while it grows."""

    def __init__(self, params: SamplingParams, prompt_ids: tuple[int, ...], tokenizer: Tokenizer | None) -> None:
        self.params = params
        self.token_ids: list[int] = []
        self.scores = Scores()
        self.pieces: list[str] = []
        self.finish: str | None = None
        self.error = ""
        self.stream = Stream(tokenizer, params.stops, prompt_ids) if tokenizer is not None else None

    def push(self, token_id: int, eos_ids: tuple[int, ...]) -> Token:
        """The next token; says whether the text ends with it. The token that ends it is kept, its text is not."""
        self.token_ids.append(token_id)
        ends = token_id in self.params.stop_ids or (token_id in eos_ids and not self.params.ignore_eos)
        if not ends and self.stream is not None:
            piece = self.stream.push(token_id, self.params.may_stop(len(self.token_ids)))
            self.pieces.append(piece.text)
            ends = piece.stop is not None
        return Token(token_id, ends)

    def end(self, reason: str, error: str = "") -> None:
        """Nothing more comes."""
        if self.finish is None:
            piece = self.stream.finish() if self.stream is not None else Piece("")
            self.pieces.append(piece.text)
            self.finish, self.error = "stop" if piece.stop is not None and reason == "length" else reason, error

    def completion(self) -> Completion:
        """The completion, frozen."""
        asked = self.params.top_logprobs is not None
        chosen = np.array(self.scores.chosen, np.float32) if asked else None
        best = tuple(self.scores.best) if asked and self.params.top_logprobs else None
        ids = tuple(self.token_ids)
        return Completion(self.params.sample_index, "".join(self.pieces), ids, self.finish or "abort", chosen, best, self.error)


class Job:
    """A prompt and its completions. `request` is what the scheduler made of it."""

    def __init__(self, params: SamplingParams, request: Request, tokenizer: Tokenizer | None) -> None:
        self.params, self.request = params, request
        self.prompt_ids = request.ask.prompt
        items = request.ask.items
        self.drafts = [Draft(each, self.prompt_ids, tokenizer) for each in params.completions() * (len(items) or 1)]
        for draft, item in zip(self.drafts, items, strict=False):
            draft.token_ids += item
        self.prompt_scores = Scores()
        self.embedding: np.ndarray[tuple[int], np.dtype[np.float32]] | None = None
        self._told = [(0, 0)] * len(self.drafts)

    @property
    def done(self) -> bool:
        return all(draft.finish is not None for draft in self.drafts)

    def news(self) -> list[Chunk]:
        """What came since the last call."""
        out = []
        for i, draft in enumerate(self.drafts):
            pieces, ids = self._told[i]
            if pieces < 0:
                continue  # its end was told; a sibling may go on
            text, new = "".join(draft.pieces[pieces:]), tuple(draft.token_ids[ids:])
            if text or new or draft.finish is not None:
                out.append(Chunk(draft.params.sample_index, text, new, draft.finish))
                self._told[i] = (len(draft.pieces) if draft.finish is None else -1, len(draft.token_ids))
        return out

    def output(self, fingerprint: str) -> Output:
        """The answer, frozen."""
        scores, asked = self.prompt_scores, self.params.top_prompt_logprobs
        first: list[Top] = [()]
        return Output(
            self.request.ask.encoder_ids or self.prompt_ids,
            tuple(draft.completion() for draft in self.drafts),
            self.params.seed,
            self.request.hit_len or 0,
            fingerprint,
            np.array([np.nan, *scores.chosen], np.float32) if asked is not None else None,
            tuple(first + scores.best) if asked else None,
        )
