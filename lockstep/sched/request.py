"""What the scheduler knows of a request: what was asked for (frozen), how far it is (lengths), and
its share of a step (frozen). There are no modes: `len(tokens) - cached_len` rows are missing. A
token that a launched step will have sampled is negative until that step is settled.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.kv.prefix import Node
from lockstep.kv.tables import PageTable
from lockstep.plan.build import BatchShape, BatchWork, PageTables, RequestPages, paths
from lockstep.run.kind import StepKind
from lockstep.types import RuleError

GroupPages = tuple[RequestPages | None, ...]  # of one request, in the groups of a kind of step
Column = NDArray[np.int64]
HEAD_START = 64  # later arrivals that one level of priority lets a request overtake
MOVING = ("tokens", "cached_len", "settled_len", "launched_in", "held_until")  # while it decodes
# The columns' rows. The request keeps its first KNOWN_LEN tokens, COUNT more are here. Below
# UNTIL_LEN nothing but decoding happens; it is 0 of a member that is outside.
CACHED_LEN, SETTLED_LEN, LAUNCHED_IN, HELD_UNTIL, KNOWN_LEN, COUNT, UNTIL_LEN = range(7)
MOST = 64  # tokens that are here at most


@dataclass(frozen=True)
class RequestSpec:
    """What is wanted, in token ids."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 16
    n: int = 1
    priority: int = 0  # a higher one goes first
    wants_prompt_logprobs: bool = False
    encoder_ids: tuple[int, ...] = ()  # computed, whole, before the prompt
    tenant: str = ""
    speculative: bool = False  # drafts may be asked for
    draft: bool = False  # by a model, with keys of its own
    embed: bool = False  # rows are wanted, and no tokens
    items: tuple[tuple[int, ...], ...] = ()  # given continuations to score: a fork each
    needs_values: bool = False  # logits depend on earlier tokens, which are settled first
    request_id: str = ""

    def __post_init__(self) -> None:
        if self.n > 1 and (self.embed or not self.max_new_tokens):
            raise RuleError("n counts completions", f"n={self.n} and no new tokens", "Use n=1")
        if self.embed and (self.encoder_ids or self.wants_prompt_logprobs):
            rule = "an embedding has no encoder and no log-probabilities"
            raise RuleError(rule, "both asked for", "Ask for one of them")

    @property
    def max_keys(self) -> int:
        """Keys that one continuation ever writes: its last token is not computed."""
        behind = [self.max_new_tokens - 1, *(len(item) - 1 for item in self.items), 0]
        return len(self.prompt) + max(behind)

    @property
    def scored_prompt_len(self) -> int:
        """Rows of the prompt whose log-probabilities are wanted: not the last one's."""
        return len(self.prompt) - 1 if self.wants_prompt_logprobs else 0

    @property
    def continuations(self) -> int:
        return len(self.items) or self.n


class Accepted(NamedTuple):
    """What a step brings a completion; of a tree `nodes` is the accepted path, from the root on."""

    token_ids: tuple[int, ...] = ()
    stop_len: int | None = None  # the text ends with so many of them
    nodes: tuple[int, ...] = ()

    def cut(self, most: int) -> tuple[tuple[int, ...], str | None]:
        """The tokens that count, if `most` are wanted, and why the completion ends with them."""
        if self.stop_len is not None and self.stop_len <= most:
            return self.token_ids[: self.stop_len], "stop"
        if len(self.token_ids) < most:
            return self.token_ids, None
        return self.token_ids[:most], "length"


class AcceptedTokens(NamedTuple):
    """What a step brings: a token per sample; `others` bring more or less than one, or an end."""

    token_ids: Column = np.zeros(0, np.int64)
    others: Mapping[int, Accepted] = {}

    def sample(self, k: int) -> Accepted:
        return self.others[k] if k in self.others else Accepted((int(self.token_ids[k]),))


class DraftTree(NamedTuple):
    """Tokens that may follow the last one, node 0; `parents[i]` is the node above node i + 1."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    pads: int = 0  # the last of them, which nobody guessed: any token makes a chain long enough

    @property
    def chain(self) -> bool:
        """Whether every token follows the one before it."""
        return self.parents == tuple(range(len(self.parents)))

    @property
    def depth(self) -> int:
        return max(map(len, paths((-1, *self.parents), len(self.parents) + 1))) - 1


class Request:
    """One continuation of a prompt. `tokens[:cached_len]` have their keys in the cache. Their
    order, by a rank, never changes: one is overtaken only by as many later ones as the head start
    allows, the best makes progress, nobody preempts in circles. No result depends on it."""

    def __init__(
        self, spec: RequestSpec, arrival: int, index: int = 0, first: Iterable[int] = ()
    ) -> None:
        self.spec, self.arrival, self.index = spec, arrival, index
        self.rank = (arrival - HEAD_START * spec.priority, arrival, index)
        self.tokens = [*spec.prompt, *first]
        self.cached_len = 0  # those that a launched step will have written included
        self.settled_len = 0  # those without
        # rows [scored_len, score_end) are still to be asked for log-probabilities
        self.scored_len, self.score_end = 0, spec.scored_prompt_len
        self.hit_len: int | None = None  # keys found in the prefix cache when it was admitted first
        self.encoded = not spec.encoder_ids
        self.table: PageTable | None = None
        self.room = 0  # keys that the pages it holds have room for, as far as was looked
        self.node: Node | None = None  # how far its keys are in the prefix tree
        self.finish: str | None = None  # "length", "stop" or "abort"
        self.siblings: list[Request] = []  # all continuations that exist, if there are several
        self.launched_in = 0  # number of the step launched last that it was in
        self.held_until = 0  # number of the step that has to be settled before the next row
        self.draft: DraftTree | None = None  # proposed for the next step
        self.pads = 0  # of the draft that was scheduled last
        self.last_tree: ScheduledRows | None = None  # of the same, for the next that is like it
        # while it decodes it is a member, of this number; inside, its first tokens are kept here
        self.members: Decoding | None = None
        self.number = -1
        self.known_tokens: list[int] = []

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What moves is not here while it is inside: asking for it takes the request out."""
            if name not in MOVING or self.members is None:
                raise AttributeError(name)
            self.members.leave(self)
            return object.__getattribute__(self, name)

    def __lt__(self, other: "Request") -> bool:
        return self.rank < other.rank

    @property
    def missing_len(self) -> int:
        return len(self.tokens) - self.cached_len

    @property
    def running(self) -> bool:
        return self.table is not None

    def samples(self, new_len: int) -> int:
        """Tokens chosen by the next `new_len` rows: one per continuation at the prompt's end."""
        spec, known = self.spec, len(self.tokens)
        first = known == len(spec.prompt)
        if new_len < known - self.cached_len or not (spec.max_new_tokens or (spec.items and first)):
            return 0
        return spec.continuations if first else 1

    @property
    def decodes(self) -> bool:
        """Whether the only row that is missing samples one token, and nothing else is wanted."""
        spec = self.spec
        begun = self.missing_len == 1 and len(self.tokens) > len(spec.prompt)
        return begun and self.scored_len >= self.score_end and spec.max_new_tokens > 0

    def fitting_len(self, tokens: int, emits: int) -> int:
        """How many of its missing rows it may compute in a step with so much room."""
        new_len = min(self.missing_len, tokens)
        while new_len > 0 and (over := self.emits(new_len) - emits) > 0:
            new_len -= 1 if self.samples(new_len) else over
        return max(0, new_len)

    def emits(self, new_len: int) -> int:
        return len(self._scored(new_len)) + self.samples(new_len)

    def rows(self, new_len: int) -> "ScheduledRows":
        """The next `new_len` rows. Emitted are those to be scored, then one for every sample."""
        samples, scored = self.samples(new_len), self._scored(new_len)
        emit = (*[row - self.cached_len for row in scored], *[new_len - 1] * samples)
        return ScheduledRows(self, new_len, emit, samples, self.table)

    def tree_rows(self, draft: DraftTree) -> "ScheduledRows":
        """The last token and what may follow it, as the nodes of a tree; all are emitted."""
        last, parents = self.last_tree, (-1, *draft.parents)
        if last is None or last.table is not self.table or last.parents != parents:
            emit = tuple(range(len(parents)))
            last = ScheduledRows(self, len(parents), emit, 1, self.table)
            last = self.last_tree = last._replace(parents=parents, chain=draft.chain)
        return last

    def launch(self, rows: "ScheduledRows", sample: int, step: int) -> None:
        """The rows are on their way in step number `step`, and so is its sample number `sample`."""
        spec = self.spec
        if rows.parents is None:
            self.cached_len += rows.new_len
            self.scored_len = max(self.scored_len, min(self.cached_len, self.score_end))
        if rows.sampled:
            self.tokens.append(-1 - sample)
        self.launched_in = step
        forks = rows.samples > 1 or rows.parents is not None
        waits = rows.samples > 0 and (spec.needs_values or self.left <= 0)
        if forks or waits or len(self.tokens) == self.cached_len:
            self.held_until = step

    def begin_item(self) -> str | None:
        """Behind the prompt come rows of all tokens of its item but the last; "length" if none."""
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


class ScheduledRows(NamedTuple):
    """A request's rows in a step, without positions and tokens: equal while it decodes."""

    request: Request
    new_len: int
    # rows whose logits are wanted; the last `samples` of them are sampled from, or all of a tree
    emit: tuple[int, ...]
    samples: int
    table: PageTable | None = None  # of the request; another one by now, if it was preempted
    cross_new: int = 0  # encoder keys that the rows write
    parents: tuple[int, ...] | None = None  # of the rows, if they are nodes of a tree
    chain: bool = False  # each below the one before: their keys lie in the pages, at their places

    @property
    def sampled(self) -> int:
        """Tokens that are sampled: an item's are given."""
        return 0 if self.request.spec.items else self.samples

    @property
    def draws(self) -> int:
        """Rows that are sampled from, an item's given first token included."""
        return self.samples if self.parents is None else self.new_len

    def known_len(self, cached_len: int) -> int:
        """Behind so many keys, tokens before those that are sampled: up to the first of `draws`."""
        return cached_len + self.new_len if self.parents is None else cached_len + 1


class Batch:
    """Who computes what in a step: the same value from step to step if the same requests decode."""

    def __init__(self, rows: tuple[ScheduledRows, ...]) -> None:
        self.rows = rows
        self.requests = tuple([each.request for each in rows])
        self.new_lens = tuple([each.new_len for each in rows])
        self.tables: PageTables | None = None  # as the last step left them
        self.needs_values = np.array([each.spec.needs_values for each in self.requests], np.bool_)
        self.drafts = any(each.spec.draft for each in self.requests)  # by a model, some of them
        # samples before those of each request, and all: lists of tokens that it brings, in order
        *self.first_samples, self.samples = accumulate([r.sampled for r in rows], initial=0)

    @cached_property
    def shape(self) -> BatchShape:
        return BatchShape.of(
            new_lens=self.new_lens,
            emits=[each.emit for each in self.rows],
            parents=[None if each.chain else each.parents for each in self.rows],
            cross_lens=[len(request.spec.encoder_ids) for request in self.requests],
            cross_news=[each.cross_new for each in self.rows],
        )

    @cached_property
    def begins(self) -> tuple[int, ...]:
        return tuple(self.shape.q_indptr.tolist())


def waits(held_until: Any, settled: int) -> Any:
    """Whether a step behind number `settled` has to be settled first. Of an int or an array."""
    return held_until > settled


class Decoding:
    """Requests that decode, as columns: a step moves their lengths and tokens all at once. Members
    are the running ones that miss one row and sample one token with it, by rank. One is inside, its
    lengths and tokens in the columns alone, up to a length at which it needs a page or may end, or
    until somebody asks the request for them. Pages are the scheduler's."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.rows: list[ScheduledRows] = []
        self.pages: list[GroupPages] = []
        self.batch: Batch | None = None  # of all members, once somebody made it, until they change
        self._columns = np.zeros((7, 0), np.int64)
        self._tokens = np.zeros((0, MOST), np.int64)
        self._everyone = np.arange(0)  # numbers
        self._new: list[Request] = []
        self._gone = False  # some of `requests` are members no more

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """It is a member, outside, and has a number from the next `update` on."""
        if request.members is None:
            request.members = self
            self._new.append(request)

    def remove(self, request: Request) -> None:
        if request.members is not None:
            self.leave(request)
            request.members, request.number, self._gone = None, -1, True

    def update(self) -> None:
        """Numbers for those that came, none for those that went."""
        if not self._new and not self._gone:
            return
        new = [request for request in self._new if request.members is not None]
        requests = self.requests + new
        rows, pages = self.rows + [each.rows(1) for each in new], self.pages + [()] * len(new)
        columns = np.concatenate((self._columns, np.zeros((7, len(new)), np.int64)), 1)
        tokens = np.concatenate((self._tokens, np.zeros((len(new), MOST), np.int64)))
        kept = [i for i, request in enumerate(requests) if request.members is not None]
        order = sorted(kept, key=lambda i: requests[i].rank)
        self.requests, self.rows = [requests[i] for i in order], [rows[i] for i in order]
        self.pages, self._columns = [pages[i] for i in order], columns[:, order]
        self._tokens, self._new, self._gone = tokens[order], [], False
        for number, request in enumerate(self.requests):
            request.number = number
        self._everyone = np.arange(len(order))
        self.batch = None

    def due(self, settled: int) -> list[Request]:
        """Who is to be looked at: outside, at his length, or held until a step is settled."""
        columns = self._columns
        due = columns[CACHED_LEN] >= columns[UNTIL_LEN]
        due |= waits(columns[HELD_UNTIL], settled)
        return [self.requests[i] for i in due.nonzero()[0].tolist()]

    def look(self, request: Request, pages: GroupPages, until_len: int) -> None:
        """A member that is outside has these pages; below `until_len` it is inside from now on."""
        i, tokens, cached_len = request.number, request.tokens, request.cached_len
        self.pages[i] = pages
        if self.rows[i].table is not request.table:
            self.rows[i], self.batch = request.rows(1), None
        until_len = min(until_len, cached_len + MOST - 1)
        if cached_len >= until_len:
            until_len = 0
        lengths = (cached_len, request.settled_len, request.launched_in, request.held_until)
        self._columns[:, i] = (*lengths, len(tokens) - 1, 1, until_len)
        self._tokens[i, 0] = tokens[-1]
        if until_len:
            tokens.pop()
            request.known_tokens = tokens
            del request.tokens, request.cached_len, request.settled_len
            del request.launched_in, request.held_until

    def leave(self, request: Request) -> None:
        """It is outside, or no member: its lengths and tokens are its own."""
        i = request.number
        if i < 0 or not self._columns[UNTIL_LEN, i]:
            return
        lengths = self._columns[:, i].tolist()
        request.cached_len, request.settled_len = lengths[:2]
        request.launched_in, request.held_until = lengths[2:4]
        request.tokens = request.known_tokens
        request.tokens += self._tokens[i, : lengths[COUNT]].tolist()
        self._columns[UNTIL_LEN, i] = 0

    def share(self, begin: int, end: int) -> tuple[Column, Column]:
        """Of members [begin, end): the keys that each has, and the token of its next row."""
        columns, those = self._columns[:, begin:end], self._everyone[begin:end]
        return columns[CACHED_LEN], self._tokens[those, columns[COUNT] - 1]

    def advance(self, number: int, needs_values: NDArray[np.bool_]) -> list[int]:
        """Step `number` of all members is launched. Returns the numbers of those that are outside:
        what the columns say of them nobody reads before `look`."""
        columns, everyone = self._columns, self._everyone
        self._tokens[everyone, columns[COUNT]] = -1 - everyone
        columns[CACHED_LEN] += 1
        columns[COUNT] += 1
        columns[LAUNCHED_IN] = number
        columns[HELD_UNTIL, needs_values] = number
        outside: list[int] = np.flatnonzero(columns[UNTIL_LEN] == 0).tolist()
        return outside

    def settle(self, batch: Batch, known_lens: Column, token_ids: Column) -> list[int]:
        """The first requests of a batch, all members then, have sampled a token each, behind so
        many. Returns which of them are not inside."""
        columns, numbers = self._columns, self._everyone
        if not len(self):
            return list(range(len(token_ids)))
        if batch is not self.batch:  # some have other numbers now, or none (-1)
            numbers = np.array([each.number for each in batch.requests[: len(token_ids)]], np.int64)
        inside = (numbers >= 0) & (columns[UNTIL_LEN, numbers] > 0)
        outside: list[int] = np.flatnonzero(~inside).tolist()
        if outside:
            numbers, known_lens, token_ids = numbers[inside], known_lens[inside], token_ids[inside]
        self._tokens[numbers, known_lens - columns[KNOWN_LEN, numbers]] = token_ids
        columns[SETTLED_LEN, numbers] = known_lens
        return outside


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """One forward pass, decided."""

    kind: StepKind
    number: int  # steps are counted from 1
    ends: int  # requests that had ended before it
    batch: Batch
    cached_lens: Column  # of every request, before it
    ids: NDArray[np.int32]  # the token of every row; -1 - k is sample k of the step before
    pages: tuple[GroupPages, ...]  # of every request
    members: int = 0  # its first requests are all the members that decode

    @property
    def work(self) -> BatchWork:
        batch = self.batch
        batch.tables = batch.tables or PageTables(self.kind.specs, len(batch.rows))
        return BatchWork(batch.shape, self.cached_lens, self.pages, batch.tables)


class StepBuilder:
    """A step in the making: room for `size` rows, and as many emitted ones. Pages are reserved."""

    def __init__(self, kind: StepKind, size: int) -> None:
        self.kind, self.tokens, self.emits = kind, size, size  # rows that there is still room for
        self.rows: list[ScheduledRows] = []
        self.cached_lens: list[Column | list[int]] = []  # behind one another, like the next
        self.ids: list[Column | list[int]] = []
        self._single = False  # the last of both are of requests that were added one by one
        self.pages: list[GroupPages] = []
        self.members = 0  # its first rows are those of all members

    def add(self, rows: ScheduledRows, ids: Sequence[int], cached_len: int = 0) -> None:
        """Rows, the tokens of which are `ids`, behind so many keys."""
        self.rows.append(rows)
        if not self._single:
            self.cached_lens.append([])
            self.ids.append([])
            self._single = True
        cast(list[int], self.cached_lens[-1]).append(cached_len)
        cast(list[int], self.ids[-1]).extend(ids)
        self.tokens -= len(ids)
        self.emits -= len(rows.emit)
        groups, table = self.kind.groups, rows.table
        self.pages.append(table.views(groups) if table is not None else (None,) * len(groups))

    @property
    def room(self) -> int:
        """Requests that there is still room for, with a row each that is emitted."""
        return min(self.tokens, self.emits)

    def add_members(self, members: Decoding, begin: int, end: int) -> None:
        """The next rows of members [begin, end)."""
        if begin == end:
            return
        cached_lens, ids = members.share(begin, end)
        self.rows += members.rows[begin:end]
        self.cached_lens.append(cached_lens)
        self.ids.append(ids)
        self._single = False
        self.pages += members.pages[begin:end]
        self.tokens -= end - begin
        self.emits -= end - begin
