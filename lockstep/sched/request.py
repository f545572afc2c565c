"""What the scheduler knows of a request: what was asked for (frozen), how far it is (lengths), and
its share of a step (frozen).

There are no modes. `len(tokens) - cached_len` rows are missing; a request that misses one row is
what others call decoding. A token that a launched step will have sampled is there before its value:
it is negative until that step is settled. What a token means, how it is sampled and when it ends a
text is the business of whoever calls `settle`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.kv.prefix import Path, Root
from lockstep.kv.tables import Table
from lockstep.plan.build import Work
from lockstep.run.kind import StepKind
from lockstep.types import RuleError


@dataclass(frozen=True)
class RequestSpec:
    """What is wanted. Ids are token ids; `encoder_ids` are computed, whole, before the prompt;
    `embed` wants rows and no tokens.

    `items` are continuations that are given, not sampled: one fork of the prompt each, whose
    tokens' log-probabilities are wanted. `needs_values` says that a row's logits are edited by the
    values of the tokens before it: none is computed before these are settled.
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
    needs_values: bool = False
    request_id: str = ""

    def __post_init__(self) -> None:
        for name in ("prompt", "encoder_ids"):
            object.__setattr__(self, name, tuple(map(int, getattr(self, name))))
        n, new, scores = self.n, self.max_new_tokens, self.wants_prompt_logprobs
        if not self.prompt:
            rule = "a prompt has at least one token"
            raise RuleError(rule, "none", "Start with the beginning-of-text token")
        if new < 0 or n < 1:
            raise RuleError("max_new_tokens >= 0 and n >= 1", f"{new} and {n}", "Ask for something")
        if self.items and (n > 1 or new or self.embed or scores or not all(self.items)):
            rule = "items have at least one token each and are all that is asked for"
            got = f"{len(self.items)} items, n={n}, {new} new tokens"
            raise RuleError(rule, got, "Ask for the rest separately")
        if n > 1 and (self.embed or not new):
            raise RuleError("n counts completions", f"n={n} and no new tokens", "Use n=1")
        if self.embed and (self.encoder_ids or scores):
            rule = "an embedding has no encoder and no log-probabilities"
            raise RuleError(rule, "both asked for", "Ask for one of them")

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
    def scored_prompt_len(self) -> int:
        """Rows of the prompt whose log-probabilities are wanted: the last one tells of no prompt
        token."""
        return len(self.prompt) - 1 if self.wants_prompt_logprobs else 0

    @property
    def continuations(self) -> int:
        """How many follow the prompt."""
        return len(self.items) or self.n


class Accepted(NamedTuple):
    """What a step brings one completion: a list of tokens, of one in plain decoding.

    Where the rows were a tree, `nodes` is the path that is accepted, from the root on: as many
    nodes as tokens.
    """

    token_ids: tuple[int, ...] = ()
    stop_len: int | None = None  # the text ends with so many of them
    nodes: tuple[int, ...] = ()

    def cut(self, most: int) -> tuple[tuple[int, ...], str | None]:
        """The tokens that count, if `most` are wanted, and why the completion ends with them, if
        it does."""
        stop_len = self.stop_len
        if stop_len is not None and stop_len <= most:
            return self.token_ids[:stop_len], "stop"
        if len(self.token_ids) < most:
            return self.token_ids, None
        return self.token_ids[:most], "length"


class DraftTree(NamedTuple):
    """Tokens that may follow a request's last one. That one is node 0; `parents[i]` is the node
    above node i + 1."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]


class Request:
    """One continuation of a prompt. `tokens[:cached_len]` have their keys in the cache, if it has a
    table at all."""

    def __init__(
        self, spec: RequestSpec, arrival: int, index: int = 0, first: Iterable[int] = ()
    ) -> None:
        self.spec, self.arrival, self.index = spec, arrival, index
        self.tokens = [*spec.prompt, *first]
        self.cached_len = 0  # those that a launched step will have written included
        self.settled_len = 0  # those without
        # rows [scored_len, score_end) are still to be asked for log-probabilities
        self.scored_len, self.score_end = 0, spec.scored_prompt_len
        self.hit_len: int | None = None  # keys found in the prefix cache when it was admitted first
        self.encoded = not spec.encoder_ids
        self.table: Table | None = None
        self.room = 0  # keys that the pages it holds have room for, as far as was looked
        # below this length a step computes one row, samples one token, and nothing else happens
        self.steady_until_len = 0
        self.path: Path | None = None
        self.finish: str | None = None  # "length", "stop" or "abort"
        self.siblings: list[Request] = [self]  # all n continuations, as far as they exist
        self.flight: Piece | None = None  # its share of the step launched last, until it is settled
        self.held = False  # until then nothing can be computed
        self.draft: DraftTree | None = None  # proposed for the next step

    @property
    def missing_len(self) -> int:
        """Rows that are missing."""
        return len(self.tokens) - self.cached_len

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.spec.prompt) :]

    @property
    def running(self) -> bool:
        """Whether it holds pages."""
        return self.table is not None

    @property
    def matchable(self) -> int | None:
        """Keys that may come from the prefix cache: rows whose log-probabilities are still wanted
        have to be computed. None: all."""
        return self.scored_len if self.scored_len < self.score_end else None

    def samples(self, new_len: int) -> int:
        """Tokens chosen when the next `new_len` rows are computed: none before the last row, one
        per continuation at the prompt's end."""
        spec, known = self.spec, len(self.tokens)
        first = known == len(spec.prompt)
        if new_len < known - self.cached_len or not (spec.max_new_tokens or (spec.items and first)):
            return 0
        return spec.continuations if first else 1

    def emits(self, new_len: int) -> int:
        """How many rows a piece of `new_len` rows emits."""
        return len(self._scored(new_len)) + self.samples(new_len)

    def piece(self, new_len: int) -> Piece:
        """The next `new_len` rows. Emitted are those whose logits are wanted: for
        log-probabilities, then for every sample."""
        begin, samples = self.cached_len, self.samples(new_len)
        ids = tuple(self.tokens[begin : begin + new_len])
        emit = (new_len - 1,) * samples
        if self.scored_len < self.score_end:
            emit = (*(row - begin for row in self._scored(new_len)), *emit)
        return Piece(self, ids, begin, emit, samples, self.table)

    def tree_piece(self, draft: DraftTree) -> Piece:
        """The last token and what may follow it, as the nodes of a tree; all are emitted."""
        ids = (self.tokens[-1], *draft.token_ids)
        emit, parents = tuple(range(len(ids))), (-1, *draft.parents)
        return Piece(self, ids, self.cached_len, emit, 1, self.table, parents=parents)

    def launch(self, piece: Piece, sample: int) -> None:
        """The piece is on its way: lengths move on, and the token that it will have sampled is
        named by its number among the step's."""
        spec = self.spec
        if piece.parents is None:
            self.cached_len += len(piece.ids)
            self.scored_len = max(self.scored_len, min(self.cached_len, self.score_end))
        if piece.sampled:
            self.tokens.append(-1 - sample)
        self.flight = piece
        self.held = (
            len(self.tokens) == self.cached_len
            or piece.samples > 1
            or piece.parents is not None
            or (piece.samples > 0 and (spec.needs_values or self.left <= 0))
        )

    def begin_item(self) -> str | None:
        """Behind the prompt come the rows of its item, whose last token is not computed. "length"
        if there are none: the prompt's last row has told of the only token."""
        self.tokens += self.spec.items[self.index][:-1]
        self.scored_len, self.score_end = len(self.spec.prompt), len(self.tokens)
        return None if self.scored_len < self.score_end else "length"

    @property
    def left(self) -> int:
        """Tokens that are still to be generated, at most."""
        return len(self.spec.prompt) + self.spec.max_new_tokens - len(self.tokens)

    def _scored(self, new_len: int) -> range:
        """The row at position p tells of token p+1."""
        end = min(self.cached_len + new_len, self.score_end)
        return range(max(self.cached_len, self.scored_len), end)


class Piece(NamedTuple):
    """A request's share of a step: `ids` are the tokens of its rows, the first at position
    `cached_len`; -1 - k is sample k of the step before."""

    request: Request
    ids: tuple[int, ...]
    cached_len: int
    # rows whose logits are wanted; the last `samples` of them are sampled from, or all of a tree
    emit: tuple[int, ...]
    samples: int
    table: Table | None = None  # of the request; another one by now, if it was preempted
    cross_new: int = 0  # encoder keys that this piece writes
    parents: tuple[int, ...] | None = None  # of the rows, if they are nodes of a tree
    steady: bool = False  # one row and one token of a request below its steady length

    @property
    def new_len(self) -> int:
        return len(self.ids)

    @property
    def sampled(self) -> int:
        """Tokens that are sampled: an item's are given."""
        return 0 if self.request.spec.items else self.samples

    @property
    def known_len(self) -> int:
        """Tokens before the ones that it samples."""
        return self.cached_len + (len(self.ids) if self.parents is None else 1)


LAST = (0,)  # the emitted row of a piece of one row


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """One forward pass, decided: `works[i]` is `pieces[i]` as `plan.build` takes it, over the
    groups of its kind."""

    kind: StepKind
    pieces: tuple[Piece, ...]
    works: tuple[Work, ...]
    samples: int  # lists of tokens that it brings, in the order of the pieces
