"""What the scheduler knows of a request: what was asked for (frozen), how far it is (lengths), and
its share of a step (frozen).

There are no modes. `len(tokens) - cached_len` rows are missing; a request that misses one row is
what others call decoding. What a token means, how it is sampled and when it ends a text is the
business of whoever calls `commit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.kv.prefix import Path, Root
from lockstep.kv.tables import Table
from lockstep.plan.build import Work
from lockstep.run.kind import StepKind
from lockstep.types import RuleError


@dataclass(frozen=True)
class Ask:
    """What is wanted. Ids are token ids; `encoder_ids` are computed, whole, before the prompt;
    `embed` wants rows and no tokens.

    `items` are continuations that are given, not sampled: one fork of the prompt each, whose
    tokens' log-probabilities are wanted.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 16
    n: int = 1
    priority: int = 0  # a higher one goes first
    wants_prompt_logprobs: bool = False
    encoder_ids: tuple[int, ...] = ()
    tenant: str = ""
    draft: bool = False
    embed: bool = False
    items: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "encoder_ids"):
            object.__setattr__(self, name, tuple(map(int, getattr(self, name))))
        if not self.prompt:
            raise RuleError(
                "a prompt has at least one token", "none", "Start with the beginning-of-text token"
            )
        if self.max_new_tokens < 0 or self.n < 1:
            raise RuleError(
                "max_new_tokens >= 0 and n >= 1",
                f"{self.max_new_tokens} and {self.n}",
                "Ask for something",
            )
        if self.items and (
            self.n > 1
            or self.max_new_tokens
            or self.embed
            or self.wants_prompt_logprobs
            or not all(self.items)
        ):
            got = f"{len(self.items)} items, n={self.n}, {self.max_new_tokens} new tokens"
            raise RuleError(
                "items have at least one token each and are all that is asked for",
                got,
                "Ask for the rest separately",
            )
        if self.n > 1 and (self.embed or not self.max_new_tokens):
            raise RuleError("n counts completions", f"n={self.n} and no new tokens", "Use n=1")
        if self.embed and (self.encoder_ids or self.wants_prompt_logprobs):
            raise RuleError(
                "an embedding has no encoder and no log-probabilities",
                "both asked for",
                "Ask for one of them",
            )

    @property
    def root(self) -> Root:
        """Who may share keys with this request."""
        return Root(self.tenant, self.encoder_ids, self.draft)

    @property
    def max_keys(self) -> int:
        """Keys that one continuation ever writes: its last token is not computed."""
        return len(self.prompt) + max(
            0, self.max_new_tokens - 1, *(len(item) - 1 for item in self.items)
        )

    @property
    def continuations(self) -> int:
        """How many follow the prompt."""
        return len(self.items) or self.n


class Token(NamedTuple):
    """A sampled token, and whether the text ends with it."""

    id: int
    stop: bool = False


class Request:
    """One continuation of a prompt. `tokens[:cached_len]` have their keys in the cache, if it has a
    table at all."""

    def __init__(self, ask: Ask, arrival: int, index: int = 0, first: Iterable[int] = ()) -> None:
        self.ask, self.arrival, self.index = ask, arrival, index
        self.tokens = [*ask.prompt, *first]
        self.cached_len = 0
        self.scored_len = (
            0  # rows, of the prompt or of an item, whose log-probabilities were handed out
        )
        self.hit_len: int | None = None  # keys found in the prefix cache when it was admitted first
        self.encoded = not ask.encoder_ids
        self.table: Table | None = None
        self.room = 0  # keys that the pages it holds have room for, as far as was looked
        # below this length a step computes one row, samples one token, and nothing else happens
        self.quiet = 0
        self.path: Path | None = None
        self.finish: str | None = None  # "length", "stop" or "abort"
        self.aborted = False  # while a step was running: ends when that step does
        self.family: list[Request] = [self]  # all n continuations, as far as they exist

    @property
    def rows(self) -> int:
        """Rows that are missing."""
        return len(self.tokens) - self.cached_len

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.ask.prompt) :]

    @property
    def running(self) -> bool:
        """Whether it holds pages."""
        return self.table is not None

    @property
    def matchable(self) -> int | None:
        """Keys that may come from the prefix cache: rows whose log-probabilities are still wanted
        have to be computed. None: all."""
        if self.ask.items:
            return max(self.scored_len, len(self.ask.prompt))
        return (
            self.scored_len
            if self.ask.wants_prompt_logprobs and self.scored_len < len(self.ask.prompt) - 1
            else None
        )

    def samples(self, new_len: int) -> int:
        """Tokens chosen when the next `new_len` rows are computed: none before the last row, one
        per continuation at the prompt's end."""
        ask, known = self.ask, len(self.tokens)
        first = known == len(ask.prompt)
        if new_len < known - self.cached_len or not (ask.max_new_tokens or (ask.items and first)):
            return 0
        return ask.continuations if first else 1

    def emits(self, new_len: int) -> int:
        """How many rows a piece of `new_len` rows emits."""
        return max(0, self._scored_end(new_len) - self._scored_begin()) + self.samples(new_len)

    def piece(self, new_len: int) -> Piece:
        """The next `new_len` rows. Emitted are those whose logits are wanted: for
        log-probabilities, then for every sample."""
        begin, samples, ask = self.cached_len, self.samples(new_len), self.ask
        ids = tuple(self.tokens[begin : begin + new_len])
        emit = (new_len - 1,) * samples
        if ask.wants_prompt_logprobs or ask.items:
            emit = (*range(self._scored_begin() - begin, self._scored_end(new_len) - begin), *emit)
        return Piece(self, ids, begin, emit, samples)

    def _scored_begin(self) -> int:
        return max(self.cached_len, self.scored_len, len(self.ask.prompt) if self.ask.items else 0)

    def _scored_end(self, new_len: int) -> int:
        """The row at position p tells of token p+1, so the prompt's last row tells of no prompt
        token; an item's rows tell of it."""
        end = self.cached_len + new_len
        if self.ask.items:
            return end
        return min(end, len(self.ask.prompt) - 1) if self.ask.wants_prompt_logprobs else 0


class Piece(NamedTuple):
    """A request's share of a step: `ids` are the tokens of its rows, the first at position
    `cached_len`."""

    request: Request
    ids: tuple[int, ...]
    cached_len: int
    emit: tuple[
        int, ...
    ]  # rows whose logits are wanted; the last `samples` of them are sampled from
    samples: int
    cross_new: int = 0  # encoder keys that this piece writes

    @property
    def new_len(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass, decided: `works[i]` is `pieces[i]` as `plan.build` takes it, over the
    groups of its kind."""

    kind: StepKind
    pieces: tuple[Piece, ...]
    works: tuple[Work, ...]


LAST = (0,)  # the emitted row of a piece of one row

Sampled = Sequence[Sequence[Token]]  # per piece, one token per sample
