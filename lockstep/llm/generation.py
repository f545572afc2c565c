"""One prompt in progress: its parameters, and the output so far of each completion.

A step changes nothing here until it is one frozen `StepResult`, which is written by position, so
that it can be written again; `requests_to_resume` rebuilds requests from what was written. Text
follows from the tokens: `publish` detokenises without the engine. Only where stop strings are
searched is the text made while the step is settled. The engine writes, the public API reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.llm.calls import Caller, Turn
from lockstep.llm.output import NOT_SPECULATED, Chunk, Completion, Floats, Output, Speculated, Top
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import Logprobs
from lockstep.sched.request import Accepted, Request
from lockstep.text import Ids, Stream, Tokenizer
from lockstep.types import RuleError

Score = tuple[float, Top]  # a token's log-probability, and the best tokens at its place
Text = tuple[Tokenizer | None, tuple[int, ...]]  # the tokenizer, and the model's end tokens


class CompletionState:
    """A completion while it grows, to at most `most` tokens. `given` tokens are an item's."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Ids, text: Text, most: int = 0, given: Ids = ()
    ) -> None:
        self.params, self.prompt_ids, self.prompt_len = params, prompt_ids, len(prompt_ids)
        self.most, self.given, self.token_ids = most, bool(given), list(given)
        self.scores: list[Score] = []
        self.pieces: list[str] = []  # one per generated token, then the held-back end
        self.finish: str | None = None
        self.over: str | None = None  # why it ends, if it already has all its tokens
        self.error = ""
        tokenizer, eos_ids = text
        self.tokenizer = None if given else tokenizer
        self.searched = self.tokenizer is not None and bool(params.stop)  # for stops
        self.scored = params.top_logprobs is not None
        self.speculated = NOT_SPECULATED
        self.end_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)))
        self.ahead: list[str] = []  # text of tokens that are being settled
        self._stream: Stream | None = None
        self._pushed = -1  # tokens whose text the stream has returned; -1 during a change

    def accept(self, token_ids: tuple[int, ...]) -> Accepted:
        """Returns a step's tokens, and at which of them the text ends. Changes no token. Where stop
        strings are searched, the new text goes to `ahead`."""
        if not self.searched:
            ends = (n for n, token_id in enumerate(token_ids, 1) if token_id in self.end_ids)
            return Accepted(token_ids, next(ends, None))
        stream, self.ahead, self._pushed = self._synced(), [], -1
        stop_len, before = None, len(self.pieces)
        for count, token_id in enumerate(token_ids, 1):
            text, stopped = self._push(stream, token_id, before + count)
            self.ahead.append(text)
            if stopped:
                stop_len = count
                break
        self._pushed = before + len(self.ahead)
        return Accepted(token_ids, stop_len)

    def end(self, reason: str, error: str = "") -> None:
        """Ends the completion. `finish` is set last: a reader that sees it sees every token."""
        if self.finish is None:
            if self.searched and self._flush() and reason == "length":
                reason = "stop"
            self.error = error
            self.finish = (self.over or reason) if reason == "length" else reason

    def publish(self) -> None:
        """Detokenises the tokens so far and, if the completion has ended, the text held back."""
        if self.tokenizer is None or self.searched:
            return
        finish, token_ids = self.finish, self.token_ids
        if missing := token_ids[len(self.pieces) :]:
            stream, self._pushed = self._synced(), -1
            for token_id in missing:
                self.pieces.append(self._push(stream, token_id, len(self.pieces) + 1)[0])
            self._pushed = len(self.pieces)
        if finish is not None and len(self.pieces) == len(token_ids):
            self._flush()

    def to_completion(self, finish: str | None) -> Completion:
        """Freezes it. `finish` is its end as read before `publish`; None counts as "abort"."""
        logprobs, top_logprobs = columns(self.scores, self.params.top_logprobs)
        return Completion(
            index=self.params.sample_index,
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            finish_reason=finish or "abort",
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            error=self.error,
            speculated=self.speculated,
        )

    def _push(self, stream: Stream, token_id: int, count: int) -> tuple[str, bool]:
        """Returns the text of token number `count` ("" for an end token), and if it ends there."""
        if token_id in self.end_ids:
            return "", True
        piece = stream.push(token_id, self.params.may_stop(count))
        return piece.text, piece.stop is not None

    def _flush(self) -> bool:
        """Appends the held-back text as the last piece; returns if a stop string completes."""
        del self.pieces[len(self.token_ids) :]
        stream, self._pushed = self._synced(), -1
        piece = stream.finish()
        self.pieces.append(piece.text)
        return piece.stop is not None

    def _synced(self) -> Stream:
        """Returns the stream in its state after the existing pieces, rebuilt after an interrupt."""
        stream, self._stream = self._stream, None
        if stream is None or self._pushed != len(self.pieces):
            assert self.tokenizer is not None, "without a tokenizer there is no text"
            stream = Stream(self.tokenizer, self.params.stop, self.prompt_ids)
            for count, token_id in enumerate(self.token_ids[: len(self.pieces)], 1):
                self._push(stream, token_id, count)
        self._stream = stream
        return stream


class Generation:
    """A prompt and its completions. `caller` waits for it; None: it waits until it is aborted."""

    def __init__(
        self, params: SamplingParams, request: Request, text: Text, caller: Caller | None = None
    ) -> None:
        self.params, self.request, self.caller = params, request, caller
        spec, each = request.spec, params.completions()
        prompt = self.prompt_ids = spec.prompt
        most = spec.max_new_tokens
        self.completions = [CompletionState(each[0], prompt, text, given=i) for i in spec.items]
        if not spec.items:
            self.completions = [CompletionState(one, prompt, text, most) for one in each]
        self.prompt_scores: list[Score] = []
        self.embedding: NDArray[np.float32] | None = None
        self._sent = [(0, 0)] * len(self.completions)
        self._turns: list[Turn] = []

    @property
    def done(self) -> bool:
        return all(completion.finish is not None for completion in self.completions)

    def publish(self) -> None:
        """Detokenises all tokens so far. Any thread may call it, at any time."""
        with Turn(self._turns):
            for completion in self.completions:
                completion.publish()

    def new_chunks(self) -> list[Chunk]:
        """Returns the output since the last call, a chunk per completion that has any."""
        ends = [completion.finish for completion in self.completions]  # read before `publish`
        self.publish()
        out = []
        for i, completion in enumerate(self.completions):
            (pieces, ids), finish = self._sent[i], ends[i]
            if pieces < 0:
                continue  # its end was reported; a sibling may continue
            text, new = "".join(completion.pieces[pieces:]), tuple(completion.token_ids[ids:])
            if text or new or finish is not None:
                out.append(Chunk(completion.params.sample_index, text, new, finish))
                sent = len(completion.pieces) if finish is None else -1
                self._sent[i] = (sent, len(completion.token_ids))
        return out

    def end(self, reason: str) -> None:
        for completion in self.completions:
            completion.end(reason)

    def continue_from(self, generated: Sequence[tuple[int, ...]]) -> None:
        """Starts every completion with these tokens; their log-probabilities are computed again."""
        for completion, token_ids in zip(self.completions, generated, strict=True):
            kept, completion.over = completion.accept(token_ids).cut(completion.most)
            if len(kept) < len(token_ids):
                rule = "generated tokens do not continue past their completion's end"
                raise RuleError(rule, f"{len(token_ids)}, and {len(kept)} count", "Cut them there")
            text = {0: tuple(completion.ahead)} if completion.searched else {}
            TokenUpdates([completion], [0], [0], {0: token_ids}, text).write()
            scores = completion.params.top_logprobs is not None
            scores |= completion is self.completions[0] and self.request.spec.wants_prompt_logprobs
            if completion.over is not None and not scores:
                completion.end(completion.over)

    def requests_to_resume(self) -> list[Request]:
        """Rebuilds its requests from the written output alone, as if all had been preempted."""
        spec, scored = self.request.spec, len(self.prompt_scores)
        unfinished = [(i, each) for i, each in enumerate(self.completions) if each.finish is None]
        first = self.completions[0]
        made = [Request(spec, self.request.arrival)]
        # the prompt was computed to its end: every completion has a first token or score
        if first.finish is not None or (first.scores if first.given else first.token_ids):
            made = [self._resumed_request(index, completion) for index, completion in unfinished]
        for request in made:
            request.hit_len = self.request.hit_len
            if len(made) > 1:
                request.siblings = made
            if request.index == 0 and scored < spec.scored_prompt_len:
                request.scored_len = scored
        self.request = made[0]
        return made

    def _resumed_request(self, index: int, completion: CompletionState) -> Request:
        """Rebuilds the request of a completion whose prompt was computed to its end. Tokens that
        still lack log-probabilities are scored; a completion that is over has no other work."""
        spec, scored = self.request.spec, len(completion.scores)
        if completion.given:
            request = Request(spec, self.request.arrival, index)
            request.begin_item()
            request.scored_len += scored - 1
            return request
        first = completion.token_ids
        if completion.over is not None:
            spec, first = replace(spec, max_new_tokens=0, n=1), first[:-1]
        request = Request(spec, self.request.arrival, index, first)
        request.scored_len = request.score_end
        if completion.params.top_logprobs is not None:
            request.score_end = len(spec.prompt) - 1 + len(completion.token_ids)
            request.scored_len = len(spec.prompt) - 1 + scored
        return request

    def output(self, fingerprint: str) -> Output:
        ends = [completion.finish for completion in self.completions]  # read before `publish`
        self.publish()
        scores: list[Score] = [(np.nan, ()), *self.prompt_scores]
        logprobs, top_logprobs = columns(scores, self.params.top_prompt_logprobs)
        return Output(
            prompt_token_ids=self.request.spec.encoder_ids or self.prompt_ids,
            completions=tuple(map(CompletionState.to_completion, self.completions, ends)),
            seed=self.params.seed,
            cached_tokens=self.request.hit_len or 0,
            fingerprint=fingerprint,
            prompt_logprobs=logprobs,
            prompt_top_logprobs=top_logprobs,
        )


class TokenUpdates(NamedTuple):
    """A step's tokens, one column per quantity; mappings hold what only some rows have, by row."""

    completions: Sequence[CompletionState]
    begins: Sequence[int]  # tokens that the completion has before the new ones
    token_ids: Sequence[int]
    others: Mapping[int, tuple[int, ...]]  # rows with more or fewer than one token
    texts: Mapping[int, tuple[str, ...]]  # rows whose text was searched for stop strings
    logprobs: Logprobs | None = None
    logprob_begins: Mapping[int, int] = {}  # a row's first log-probability, if wanted
    speculated: Mapping[int, Speculated] = {}  # drafting counts so far

    def write(self) -> None:
        """Writes every completion that has not ended; ended ones were written before they ended."""
        others, begins = self.others, self.begins
        going = {row: each for row, each in enumerate(self.completions) if each.finish is None}
        for row, completion in going.items():
            completion.token_ids[begins[row] :] = others.get(row, (self.token_ids[row],))
        for row in going.keys() & self.texts.keys():
            going[row].pieces[begins[row] :] = self.texts[row]
        for row in going.keys() & self.speculated.keys():
            going[row].speculated = self.speculated[row]
        found = [] if self.logprobs is None else entries(self.logprobs, self.logprobs.top.shape[1])
        for row, first in self.logprob_begins.items():
            if row in going:
                own = found[first : first + len(others.get(row, (0,)))]
                k = going[row].params.numbers.top or 0
                going[row].scores[begins[row] :] = [(one, best[:k]) for one, best in own]


class ScoreUpdate(NamedTuple):
    """Log-probabilities of given tokens, for entries `at` and up, each with the k best tokens."""

    request: Request
    target: list[Score]
    at: int
    logprobs: Logprobs
    k: int

    def write(self) -> None:
        self.target[self.at :] = entries(self.logprobs, self.k)


def entries(logprobs: Logprobs, k: int) -> list[Score]:
    """Returns a `Score` per row, with the k best tokens."""
    chosen, top_ids, top = (column.tolist() for column in logprobs)
    pairs = zip(top_ids, top, strict=True)
    best = [tuple(zip(ids[:k], each[:k], strict=True)) for ids, each in pairs]
    return list(zip(chosen, best, strict=True))


def columns(scores: Sequence[Score], k: int | None) -> tuple[Floats | None, tuple[Top, ...] | None]:
    """Returns log-probabilities float32 [tokens] and the k best of each, or None if not wanted."""
    logprobs = np.array([logprob for logprob, _ in scores], np.float32)
    best = tuple(best for _, best in scores)
    return (None if k is None else logprobs), (best if k else None)


class Ending(NamedTuple):
    """A completion that ends with this step."""

    completion: CompletionState
    reason: str
    error: str = ""


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a settled step. `write` may be interrupted anywhere and repeated."""

    tokens: TokenUpdates | None = None
    scores: tuple[ScoreUpdate, ...] = ()
    embeddings: tuple[tuple[Generation, NDArray[np.float32]], ...] = ()
    endings: tuple[Ending, ...] = ()
    leaving: frozenset[Generation] = frozenset()  # of `endings`; they leave when done

    def write(self) -> None:
        for score in self.scores:
            score.write()
        if self.tokens is not None:
            self.tokens.write()
        for generation, embedding in self.embeddings:
            generation.embedding = embedding
        for completion, reason, error in self.endings:  # `end` keeps the first reason
            completion.end(reason, error)
