"""One prompt on its way: what was asked, and what has come out so far, per completion.

A `Draft` grows by one token at a time: the text that is certain, the log-probabilities, and why it
ended. `Job.output` freezes all of it. A step changes nothing here until it is one frozen
`StepResult`. That is written by position, so that it can be written again: after whatever exception
a job is what its last result says, and its requests are made anew from that (`resumed`). Knows
tokens and text; the engine feeds it, the surface reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.llm.calls import Caller
from lockstep.llm.output import Chunk, Completion, Output, Top
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import Request, Token
from lockstep.text.detok import Piece, Stream
from lockstep.text.tokenizer import Tokenizer

Score = tuple[float, Top]  # the log-probability of a token, and the best tokens beside it


@dataclass
class Scores:
    """Log-probabilities of tokens in order, and the best tokens beside each."""

    chosen: list[float] = field(default_factory=list)
    best: list[Top] = field(default_factory=list)

    def write(self, at: int, scores: Sequence[Score]) -> None:
        """From position `at` on there are these and no others."""
        self.chosen[at:] = [logprob for logprob, _ in scores]
        self.best[at:] = [best for _, best in scores]


class Draft:
    """A completion while it grows. `given` tokens, an item's, are all there from the beginning;
    their text is not wanted."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        given: Sequence[int] = (),
    ) -> None:
        self.params, self.prompt_ids, self.tokenizer = params, prompt_ids, tokenizer
        self.token_ids: list[int] = list(given)
        self.given = bool(given)
        self.scores = Scores()
        self.pieces: list[
            str
        ] = []  # one per generated token, and one for what was held back until the end
        self.finish: str | None = None
        self.error = ""
        self.stream = self._stream()

    def feed(self, token_id: int, count: int, eos_ids: tuple[int, ...]) -> tuple[str, bool]:
        """The text that token number `count` adds, and whether the text ends with it. Moves the
        stream on and nothing else.

        The token that ends a text is kept, its own text is not.
        """
        if token_id in self.params.stop_ids or (token_id in eos_ids and not self.params.ignore_eos):
            return "", True
        if self.stream is None:
            return "", False
        piece = self.stream.push(token_id, self.params.may_stop(count))
        return piece.text, piece.stop is not None

    def end(self, reason: str, error: str = "") -> None:
        """Nothing more comes. `finish` is set last: who sees it sees everything."""
        if self.finish is None:
            piece = self.stream.finish() if self.stream is not None else Piece("")
            self.pieces[0 if self.given else len(self.token_ids) :] = [piece.text]
            self.error = error
            self.finish = "stop" if piece.stop is not None and reason == "length" else reason

    def replay(self, eos_ids: tuple[int, ...]) -> None:
        """The stream anew, as it is after the tokens that are there."""
        self.stream = self._stream()
        for count, token_id in enumerate(() if self.given else self.token_ids, 1):
            self.feed(token_id, count, eos_ids)

    def completion(self) -> Completion:
        """The completion, frozen."""
        asked = self.params.top_logprobs is not None
        chosen = np.array(self.scores.chosen, np.float32) if asked else None
        best = tuple(self.scores.best) if asked and self.params.top_logprobs else None
        ids = tuple(self.token_ids)
        return Completion(
            self.params.sample_index,
            "".join(self.pieces),
            ids,
            self.finish or "abort",
            chosen,
            best,
            self.error,
        )

    def _stream(self) -> Stream | None:
        return (
            Stream(self.tokenizer, self.params.stops, self.prompt_ids)
            if self.tokenizer is not None
            else None
        )


class Job:
    """A prompt and its completions. `request` is what the scheduler made of it; `caller` waits for
    it, None for whoever holds the job."""

    def __init__(
        self,
        params: SamplingParams,
        request: Request,
        tokenizer: Tokenizer | None,
        caller: Caller | None = None,
    ) -> None:
        self.params, self.request, self.caller = params, request, caller
        self.prompt_ids = request.ask.prompt
        items, each = request.ask.items, params.completions()
        self.drafts = [Draft(each[0], self.prompt_ids, tokenizer, item) for item in items]
        self.drafts = self.drafts or [Draft(one, self.prompt_ids, tokenizer) for one in each]
        self.prompt_scores = Scores()
        self.embedding: NDArray[np.float32] | None = None
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
                self._told[i] = (
                    len(draft.pieces) if draft.finish is None else -1,
                    len(draft.token_ids),
                )
        return out

    def end(self, reason: str) -> None:
        """Nothing more comes for any completion."""
        for draft in self.drafts:
            draft.end(reason)

    def replay(self, eos_ids: tuple[int, ...]) -> None:
        """The text streams anew, of the completions that go on."""
        for draft in self.drafts:
            if draft.finish is None:
                draft.replay(eos_ids)

    def resumed(self) -> list[Request]:
        """The requests of this job anew, from what has come out and nothing else: as if all of them
        had been preempted."""
        old = self.request
        items, begun = old.ask.items, self._begun()
        made: list[Request] = []
        for index, draft in enumerate(self.drafts if begun else self.drafts[:1]):
            if draft.finish is None:
                first = items[index][:-1] if items else draft.token_ids
                request = Request(old.ask, old.arrival, index, first if begun else ())
                request.scored_len = len(self.prompt_scores.chosen)
                if items and begun:
                    request.scored_len = len(old.ask.prompt) + len(draft.scores.chosen) - 1
                request.hit_len, request.family = old.hit_len, made
                made.append(request)
        self.request = made[0]
        return made

    def _begun(self) -> bool:
        """Whether the prompt was computed to its end: then every completion has its first token, or
        its item's first score, or ended."""
        first = self.drafts[0]
        return first.finish is not None or bool(
            first.scores.chosen if first.given else first.token_ids
        )

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


class TokenUpdate(NamedTuple):
    """The next token of a completion: number `at`, with its text, and its log-probability if that
    is wanted."""

    draft: Draft
    at: int
    token_id: int
    text: str
    scores: tuple[Score, ...]

    def write(self) -> None:
        draft = self.draft
        if draft.finish is None:  # else it was written, and then ended
            draft.token_ids[self.at :] = [self.token_id]
            draft.pieces[self.at :] = [self.text]
            draft.scores.write(self.at, self.scores)


class ScoreUpdate(NamedTuple):
    """Log-probabilities of given tokens, of a prompt or an item, from position `at` on."""

    target: Scores
    at: int
    scores: tuple[Score, ...]

    def write(self) -> None:
        self.target.write(self.at, self.scores)


class Ending(NamedTuple):
    """A completion ends with this step."""

    draft: Draft
    reason: str
    error: str = ""


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step has brought: `sampled` for the scheduler, the rest for the jobs.

    `write`, then `end`; both may be repeated from the beginning wherever they were left.
    """

    sampled: tuple[tuple[Token, ...], ...]
    tokens: tuple[TokenUpdate, ...] = ()
    scores: tuple[ScoreUpdate, ...] = ()
    embeddings: tuple[tuple[Job, NDArray[np.float32]], ...] = ()
    endings: tuple[Ending, ...] = ()

    def write(self) -> None:
        """Tokens, their text and log-probabilities, embeddings."""
        for token in self.tokens:
            token.write()
        for score in self.scores:
            score.write()
        for job, embedding in self.embeddings:
            job.embedding = embedding

    def end(self) -> None:
        """The completions that end. The first reason counts."""
        for draft, reason, error in self.endings:
            draft.end(reason, error)
