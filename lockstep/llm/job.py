"""One prompt on its way: what was asked, and what has come out so far, per completion.

A `Draft` grows by the tokens of a step: ids, log-probabilities, text, and why it ended.
`Job.output` freezes all of it. A step changes nothing here until it is one frozen `StepResult`,
written by position, so that it can be written again: after whatever exception a job is what its
last result says, and its requests are made anew from that (`resumed`). Text follows from the
tokens: it is made by `publish`, without the engine; only where stop strings are looked for, as the
step is settled. Knows tokens and text; the engine feeds it, the surface reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.llm.calls import Caller, Turn
from lockstep.llm.output import Chunk, Completion, Output, Top
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import Logprobs
from lockstep.sched.request import Accepted, Request
from lockstep.text.detok import Stream
from lockstep.text.tokenizer import Tokenizer
from lockstep.types import RuleError

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
    """A completion while it grows, to `most` tokens. `given` ones, an item's, are all there from
    the beginning; their text is not wanted."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: tuple[int, ...],
        text: Text,
        most: int = 0,
        given: Sequence[int] = (),
    ) -> None:
        self.params, self.prompt_ids, self.most = params, prompt_ids, most
        self.penalised, self.prompt_len = params.penalised, len(prompt_ids)
        self.token_ids: list[int] = list(given)
        self.given = bool(given)
        self.scores = Scores()
        # one per generated token, and one for what was held back until the end
        self.pieces: list[str] = []
        self.finish: str | None = None
        self.over: str | None = None  # why it ends, if its tokens are all there already
        self.error = ""
        self.tokenizer = None if given else text.tokenizer
        self.searched = self.tokenizer is not None and bool(params.stops)  # for stop strings
        self.end_ids = frozenset((*params.stop_ids, *(() if params.ignore_eos else text.eos_ids)))
        self.ahead: list[str] = []  # text of tokens that are being settled
        self._stream: Stream | None = None
        self._pushed = -1  # tokens whose text the stream has given; -1 while it moves

    def accept(self, token_ids: tuple[int, ...]) -> Accepted:
        """The tokens as a step's, and where the text ends with one of them. No token is changed;
        where stop strings are looked for, the text goes `ahead`."""
        if not self.searched:
            if self.end_ids.isdisjoint(token_ids):
                return Accepted(token_ids)
            ends = [token_id in self.end_ids for token_id in token_ids]
            return Accepted(token_ids, ends.index(True) + 1)
        stream, self.ahead, self._pushed = self._synced(), [], -1
        stopped = False
        while not stopped and len(self.ahead) < len(token_ids):
            count = len(self.pieces) + len(self.ahead) + 1
            text, stopped = self._push(stream, token_ids[len(self.ahead)], count)
            self.ahead.append(text)
        self._pushed = len(self.pieces) + len(self.ahead)
        return Accepted(token_ids, len(self.ahead) if stopped else None)

    def end(self, reason: str, error: str = "") -> None:
        """Nothing more comes. `finish` is set last: who sees it sees every token."""
        if self.finish is None:
            if self.searched and self._flush() and reason == "length":
                reason = "stop"
            self.error = error
            self.finish = (self.over or reason) if reason == "length" else reason

    def publish(self) -> None:
        """The text of the tokens that are there, and at the end what was held back."""
        if self.tokenizer is None or self.searched:
            return
        finish, token_ids = self.finish, self.token_ids
        for token_id in token_ids[len(self.pieces) :]:
            stream, self._pushed = self._synced(), -1
            self.pieces.append(self._push(stream, token_id, len(self.pieces) + 1)[0])
            self._pushed = len(self.pieces)
        if finish is not None and len(self.pieces) == len(token_ids):
            self._flush()

    def completion(self) -> Completion:
        """The completion, frozen."""
        asked = self.params.top_logprobs is not None
        chosen = np.array(self.scores.chosen, np.float32) if asked else None
        best = tuple(self.scores.best) if asked and self.params.top_logprobs else None
        return Completion(
            index=self.params.sample_index,
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish or "abort",
            logprobs=chosen,
            top_logprobs=best,
            error=self.error,
        )

    def _push(self, stream: Stream, token_id: int, count: int) -> tuple[str, bool]:
        """The text that token number `count` adds, and whether the text ends with it. The token
        that ends a text is kept, its own text is not."""
        if token_id in self.end_ids:
            return "", True
        piece = stream.push(token_id, self.params.may_stop(count))
        return piece.text, piece.stop is not None

    def _flush(self) -> bool:
        """What was held back becomes the last piece; whether a stop string is complete in it."""
        del self.pieces[len(self.token_ids) :]
        stream, self._pushed = self._synced(), -1
        piece = stream.finish()
        self.pieces.append(piece.text)
        return piece.stop is not None

    def _synced(self) -> Stream:
        """The stream as it is after the pieces that are there: an exception may have struck
        anywhere in between."""
        stream, self._stream = self._stream, None
        if stream is None or self._pushed != len(self.pieces):
            assert self.tokenizer is not None, "without a tokenizer there is no text"
            stream = Stream(self.tokenizer, self.params.stops, self.prompt_ids)
            for count, token_id in enumerate(self.token_ids[: len(self.pieces)], 1):
                self._push(stream, token_id, count)
        self._stream = stream
        return stream


class Text(NamedTuple):
    """What text is made with: nothing, if there is no tokenizer; and the model's ends of text."""

    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]


class Job:
    """A prompt and its completions. `request` is what the scheduler made of it; `caller` waits for
    it, None for whoever holds the job."""

    def __init__(
        self, params: SamplingParams, request: Request, text: Text, caller: Caller | None = None
    ) -> None:
        self.params, self.request, self.caller = params, request, caller
        self.prompt_ids = request.ask.prompt
        ask, each = request.ask, params.completions()
        self.drafts = [Draft(each[0], ask.prompt, text, given=item) for item in ask.items]
        if not ask.items:
            self.drafts = [Draft(one, ask.prompt, text, ask.max_new_tokens) for one in each]
        self.prompt_scores = Scores()
        self.embedding: NDArray[np.float32] | None = None
        self._told = [(0, 0)] * len(self.drafts)
        self._turns: list[Turn] = []

    @property
    def done(self) -> bool:
        return all(draft.finish is not None for draft in self.drafts)

    def publish(self) -> None:
        """Text for all tokens that are there. Any thread may call it, at any time."""
        with Turn(self._turns):
            for draft in self.drafts:
                draft.publish()

    def news(self) -> list[Chunk]:
        """What came since the last call."""
        self.publish()
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

    def go_on(self, generated: Sequence[tuple[int, ...]]) -> None:
        """Every completion has these tokens already; their log-probabilities, if they are wanted,
        come again."""
        for draft, token_ids in zip(self.drafts, generated, strict=True):
            kept, draft.over = draft.accept(token_ids).cut(draft.most)
            if len(kept) < len(token_ids):
                rule = "tokens already generated end where their completion does"
                raise RuleError(rule, f"{len(token_ids)}, and {len(kept)} count", "Cut them there")
            TokenUpdate(draft, 0, token_ids, tuple(draft.ahead)).write()
            if draft.over is not None and draft.params.top_logprobs is None:
                draft.end(draft.over)

    def resumed(self) -> list[Request]:
        """The requests of this job anew, from what has come out and nothing else: as if all of them
        had been preempted."""
        begun = self._begun()
        made = [
            self._resumed(index, draft)
            if begun
            else Request(self.request.ask, self.request.arrival)
            for index, draft in enumerate(self.drafts if begun else self.drafts[:1])
            if draft.finish is None
        ]
        for request in made:
            request.hit_len, request.family = self.request.hit_len, made
            if (
                request.index == 0
                and len(self.prompt_scores.chosen) < self.request.ask.scored_prompt_len
            ):
                request.scored_len = len(self.prompt_scores.chosen)
        self.request = made[0]
        return made

    def _resumed(self, index: int, draft: Draft) -> Request:
        """A completion whose prompt was computed to its end. Tokens without log-probabilities that
        are wanted are scored, those of a completion that is over alone."""
        ask, scored = self.request.ask, len(draft.scores.chosen)
        if draft.given:
            request = Request(ask, self.request.arrival, index)
            request.begin_item()
            request.scored_len += scored - 1
            return request
        first = draft.token_ids
        if draft.over is not None:
            ask, first = replace(ask, max_new_tokens=0, n=1), first[:-1]
        request = Request(ask, self.request.arrival, index, first)
        request.scored_len = request.score_end
        if draft.params.top_logprobs is not None:
            request.score_end = len(ask.prompt) - 1 + len(draft.token_ids)
            request.scored_len = len(ask.prompt) - 1 + scored
        return request

    def _begun(self) -> bool:
        """Whether the prompt was computed to its end: then every completion has its first token, or
        its item's first score, or ended."""
        first = self.drafts[0]
        return first.finish is not None or bool(
            first.scores.chosen if first.given else first.token_ids
        )

    def output(self, fingerprint: str) -> Output:
        """The answer, frozen."""
        self.publish()
        scores, asked = self.prompt_scores, self.params.top_prompt_logprobs
        first: list[Top] = [()]
        return Output(
            prompt_token_ids=self.request.ask.encoder_ids or self.prompt_ids,
            completions=tuple(draft.completion() for draft in self.drafts),
            seed=self.params.seed,
            cached_tokens=self.request.hit_len or 0,
            fingerprint=fingerprint,
            prompt_logprobs=(
                np.array([np.nan, *scores.chosen], np.float32) if asked is not None else None
            ),
            prompt_top_logprobs=tuple(first + scores.best) if asked else None,
        )


class TokenUpdate(NamedTuple):
    """Tokens of a completion, from number `at` on, with their text if it was searched, and with
    their log-probabilities if these are wanted: from row `row` of `logprobs` on."""

    draft: Draft
    at: int
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...] = ()
    logprobs: Logprobs | None = None
    row: int | None = None

    def write(self) -> None:
        draft = self.draft
        if draft.finish is None:  # else it was written, and then ended
            draft.token_ids[self.at :] = self.token_ids
            if draft.searched:
                draft.pieces[self.at :] = self.pieces
            if self.logprobs is not None and self.row is not None:
                rows = range(self.row, self.row + len(self.token_ids))
                k = draft.params.top_logprobs or 0
                draft.scores.write(self.at, [entry(self.logprobs, row, k) for row in rows])


class ScoreUpdate(NamedTuple):
    """Log-probabilities of tokens that a request was given, from number `at` on, and the k best
    beside each."""

    request: Request
    target: Scores
    at: int
    logprobs: Logprobs
    k: int

    def write(self) -> None:
        rows = range(len(self.logprobs.chosen))
        self.target.write(self.at, [entry(self.logprobs, row, self.k) for row in rows])


def entry(logprobs: Logprobs, row: int, k: int) -> Score:
    """One token's."""
    best = zip(logprobs.top_ids[row, :k].tolist(), logprobs.top[row, :k].tolist(), strict=True)
    return float(logprobs.chosen[row]), tuple(best)


class Ending(NamedTuple):
    """A completion ends with this step."""

    draft: Draft
    reason: str
    error: str = ""


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a settled step has brought the jobs.

    `write`, then `end`; both may be repeated from the beginning wherever they were left.
    """

    tokens: tuple[TokenUpdate, ...] = ()
    scores: tuple[ScoreUpdate, ...] = ()
    embeddings: tuple[tuple[Job, NDArray[np.float32]], ...] = ()
    endings: tuple[Ending, ...] = ()

    def write(self) -> None:
        """Log-probabilities of what was there, tokens, embeddings."""
        for score in self.scores:
            score.write()
        for token in self.tokens:
            token.write()
        for job, embedding in self.embeddings:
            job.embedding = embedding

    def end(self) -> None:
        """The completions that end. The first reason counts."""
        for draft, reason, error in self.endings:
            draft.end(reason, error)
