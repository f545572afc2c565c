"""The scheduler's view of a request: what was asked for (frozen), its progress (lengths), and its
share of a step (frozen). There are no modes: `len(tokens) - cached_len` rows are missing. A token
that a launched step will have sampled is negative until that step is settled.
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

GroupPages = tuple[RequestPages | None, ...]  # one request's, per group of a kind of step
Column = NDArray[np.int64]
HEAD_START = 64  # earlier arrivals that one level of priority lets a request overtake
COLUMN_FIELDS = (
    "tokens",
    "cached_len",
    "settled_len",
    "launched_in",
    "held_until",
)  # in the columns
# The columns' rows. The request keeps its first KNOWN_LEN tokens, COUNT more are in the columns.
# Below UNTIL_LEN nothing but decoding happens; it is 0 for a member that is outside.
CACHED_LEN, SETTLED_LEN, LAUNCHED_IN, HELD_UNTIL, KNOWN_LEN, COUNT, UNTIL_LEN = range(7)
MOST = 64  # tokens that the columns hold per member


@dataclass(frozen=True)
class RequestSpec:
    """What a request asks for, in token ids."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 16
    n: int = 1
    priority: int = 0  # a higher one goes first
    wants_prompt_logprobs: bool = False
    encoder_ids: tuple[int, ...] = ()  # all computed before the prompt
    tenant: str = ""
    speculative: bool = False  # may be drafted for
    draft: bool = False  # by a draft model, which has keys of its own
    embed: bool = False  # rows are wanted, and no tokens
    items: tuple[tuple[int, ...], ...] = ()  # given continuations to score, a fork each
    needs_values: bool = False  # logits depend on earlier tokens' values: settle them first
    request_id: str = ""

    def __post_init__(self) -> None:
        if self.n > 1 and (self.embed or not self.max_new_tokens):
            raise RuleError("n > 1 needs new tokens", f"n={self.n} and none", "Use n=1")
        if self.embed and (self.encoder_ids or self.wants_prompt_logprobs):
            rule = "an embedding has no encoder and no log-probabilities"
            raise RuleError(rule, "both asked for", "Ask for one of them")

    @property
    def max_keys(self) -> int:
        """Most keys that one continuation writes: its last token is never computed."""
        behind = [self.max_new_tokens - 1, *(len(item) - 1 for item in self.items), 0]
        return len(self.prompt) + max(behind)

    @property
    def scored_prompt_len(self) -> int:
        """Prompt rows whose log-probabilities are wanted; the last row's never are."""
        return len(self.prompt) - 1 if self.wants_prompt_logprobs else 0

    @property
    def continuations(self) -> int:
        return len(self.items) or self.n


class Accepted(NamedTuple):
    """A completion's tokens from a step; for a tree `nodes` is the accepted path from the root."""

    token_ids: tuple[int, ...] = ()
    stop_len: int | None = None  # tokens up to where the text ends
    nodes: tuple[int, ...] = ()

    def cut(self, most: int) -> tuple[tuple[int, ...], str | None]:
        """Returns the tokens that count if `most` are wanted, and why the text ends there."""
        if self.stop_len is not None and self.stop_len <= most:
            return self.token_ids[: self.stop_len], "stop"
        if len(self.token_ids) < most:
            return self.token_ids, None
        return self.token_ids[:most], "length"


class AcceptedTokens(NamedTuple):
    """A step's tokens, one per sample; `others`: samples with an end, or not exactly one token."""

    token_ids: Column = np.zeros(0, np.int64)
    others: Mapping[int, Accepted] = {}

    def sample(self, k: int) -> Accepted:
        return self.others[k] if k in self.others else Accepted((int(self.token_ids[k]),))


class DraftTree(NamedTuple):
    """Draft tokens after the last token, node 0; `parents[i]` is the parent of node i + 1."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    pads: int = 0  # trailing tokens that only lengthen the chain: not guesses

    @property
    def chain(self) -> bool:
        """Whether every node is the child of the node before it."""
        return self.parents == tuple(range(len(self.parents)))

    @property
    def depth(self) -> int:
        return max(map(len, paths((-1, *self.parents), len(self.parents) + 1))) - 1


class Request:
    """One continuation of a prompt; the keys of `tokens[:cached_len]` are in the cache. Its rank
    never changes: only later requests within the head start overtake it, so the best-ranked makes
    progress and preemption has no cycles. No result depends on the order."""

    def __init__(
        self, spec: RequestSpec, arrival: int, index: int = 0, first: Iterable[int] = ()
    ) -> None:
        self.spec, self.arrival, self.index = spec, arrival, index
        self.rank = (arrival - HEAD_START * spec.priority, arrival, index)
        self.tokens = [*spec.prompt, *first]
        self.cached_len = 0  # including keys that a launched step will have written
        self.settled_len = 0  # without these
        # rows [scored_len, score_end) still have to be scored (log-probabilities)
        self.scored_len, self.score_end = 0, spec.scored_prompt_len
        self.hit_len: int | None = None  # keys found in the prefix cache at first admission
        self.encoded = not spec.encoder_ids
        self.table: PageTable | None = None
        self.room = 0  # keys that its pages have room for, as last computed
        self.node: Node | None = None  # the tree node that its keys reach
        self.finish: str | None = None  # "length", "stop" or "abort"
        self.siblings: list[Request] = []  # all existing continuations, if several
        self.launched_in = 0  # number of its last launched step
        self.held_until = 0  # number of the step to settle before the next row
        self.draft: DraftTree | None = None  # proposed for the next step
        self.pads = 0  # pad tokens of the last scheduled draft
        self.last_tree: ScheduledRows | None = None  # its rows, reused if the next is alike
        # its membership and number while it decodes; `known_tokens`: its first tokens while inside
        self.members: Decoding | None = None
        self.number = -1
        self.known_tokens: list[int] = []

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Takes the request out of the columns, which have its MOVING attributes till then."""
            if name not in COLUMN_FIELDS or self.members is None:
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
        """Counts samples of the next `new_len` rows: one per continuation at the prompt's end."""
        spec, known = self.spec, len(self.tokens)
        first = known == len(spec.prompt)
        if new_len < known - self.cached_len or not (spec.max_new_tokens or (spec.items and first)):
            return 0
        return spec.continuations if first else 1

    @property
    def decodes(self) -> bool:
        """Whether its only missing row samples one token, and nothing else is wanted."""
        spec = self.spec
        begun = self.missing_len == 1 and len(self.tokens) > len(spec.prompt)
        return begun and self.scored_len >= self.score_end and spec.max_new_tokens > 0

    def fitting_len(self, tokens: int, emits: int) -> int:
        """Returns how many missing rows fit into `tokens` rows, `emits` of them emitted."""
        new_len = min(self.missing_len, tokens)
        while new_len > 0 and (over := self.emits(new_len) - emits) > 0:
            new_len -= 1 if self.samples(new_len) else over
        return max(0, new_len)

    def emits(self, new_len: int) -> int:
        return len(self._scored(new_len)) + self.samples(new_len)

    def rows(self, new_len: int) -> "ScheduledRows":
        """Returns the next `new_len` rows. Scored rows are emitted first, then one per sample."""
        samples, scored = self.samples(new_len), self._scored(new_len)
        emit = (*[row - self.cached_len for row in scored], *[new_len - 1] * samples)
        return ScheduledRows(self, new_len, emit, samples, self.table)

    def tree_rows(self, draft: DraftTree) -> "ScheduledRows":
        """Returns the last token and its draft as rows, the nodes of a tree; all are emitted."""
        last, parents = self.last_tree, (-1, *draft.parents)
        if last is None or last.table is not self.table or last.parents != parents:
            emit = tuple(range(len(parents)))
            last = ScheduledRows(self, len(parents), emit, 1, self.table)
            last = self.last_tree = last._replace(parents=parents, chain=draft.chain)
        return last

    def launch(self, rows: "ScheduledRows", sample: int, step: int) -> None:
        """Records that the rows are launched in step number `step`, with its sample `sample`."""
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
        """Appends its item's tokens but the last, as rows to score; returns "length" if none."""
        self.tokens += self.spec.items[self.index][:-1]
        self.scored_len, self.score_end = len(self.spec.prompt), len(self.tokens)
        return None if self.scored_len < self.score_end else "length"

    @property
    def left(self) -> int:
        """Most tokens that are still to be generated."""
        return len(self.spec.prompt) + self.spec.max_new_tokens - len(self.tokens)

    def _scored(self, new_len: int) -> range:
        """Returns the positions to score: the row at p gives the logits of token p + 1."""
        end = min(self.cached_len + new_len, self.score_end)
        return range(max(self.cached_len, self.scored_len), end)


class ScheduledRows(NamedTuple):
    """A request's rows in a step, without positions and tokens: equal while it decodes."""

    request: Request
    new_len: int
    # rows whose logits are wanted; the last `samples` are sampled from, or all rows of a tree
    emit: tuple[int, ...]
    samples: int
    table: PageTable | None = None  # the request's then; it has another after a preemption
    cross_new: int = 0  # encoder keys that the rows write
    parents: tuple[int, ...] | None = None  # per row, if the rows are a tree's nodes
    chain: bool = False  # each the child of the one before: keys go to their places in the pages

    @property
    def sampled(self) -> int:
        """Tokens that are sampled; none for an item, whose tokens are given."""
        return 0 if self.request.spec.items else self.samples

    @property
    def draws(self) -> int:
        """Rows that are sampled from, including the given first token of an item."""
        return self.samples if self.parents is None else self.new_len

    def known_len(self, cached_len: int) -> int:
        """Returns the number of tokens before the first sampled one, after `cached_len` keys."""
        return cached_len + self.new_len if self.parents is None else cached_len + 1


class Batch:
    """The requests of a step and their rows: the same value while the same requests decode."""

    def __init__(self, rows: tuple[ScheduledRows, ...]) -> None:
        self.rows = rows
        self.requests = tuple([each.request for each in rows])
        self.new_lens = tuple([each.new_len for each in rows])
        self.tables: PageTables | None = None  # as the last step left them
        self.needs_values = np.array([each.spec.needs_values for each in self.requests], np.bool_)
        self.drafts = any(each.spec.draft for each in self.requests)  # any with a draft model
        # index of each request's first sample, in order; and the number of samples
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


def is_held(held_until: Any, settled: int) -> Any:
    """Whether step `held_until` is not settled yet, if `settled` is the last. Int or array."""
    return held_until > settled


class Decoding:
    """Requests that decode, as columns: one operation moves the lengths and tokens of all. Members
    are the running requests that miss one row and sample one token with it, by rank. A member is
    inside, with lengths and tokens in the columns alone, up to a length at which it may need a page
    or end, or until its attributes are read. The scheduler reserves pages."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.rows: list[ScheduledRows] = []
        self.pages: list[GroupPages] = []
        self.batch: Batch | None = None  # of all members; None until made or when they change
        self._columns = np.zeros((7, 0), np.int64)
        self._tokens = np.zeros((0, MOST), np.int64)
        self._everyone = np.arange(0)  # all numbers
        self._new: list[Request] = []
        self._gone = False  # some of `requests` are no longer members

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """Makes it a member, outside at first; the next `update` gives it a number."""
        if request.members is None:
            request.members = self
            self._new.append(request)

    def remove(self, request: Request) -> None:
        if request.members is not None:
            self.leave(request)
            request.members, request.number, self._gone = None, -1, True

    def update(self) -> None:
        """Renumbers the members after some were added or removed."""
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
        """Returns members to handle singly: outside, at their length, or held until a settling."""
        columns = self._columns
        due = columns[CACHED_LEN] >= columns[UNTIL_LEN]
        due |= is_held(columns[HELD_UNTIL], settled)
        return [self.requests[i] for i in due.nonzero()[0].tolist()]

    def look(self, request: Request, pages: GroupPages, until_len: int) -> None:
        """Stores the pages of a member that is outside, and moves it inside up to `until_len`."""
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
        """Moves a member outside: its lengths and tokens become its own attributes again."""
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
        """Returns, for members [begin, end), the cached_len and the token of the next row."""
        columns, those = self._columns[:, begin:end], self._everyone[begin:end]
        return columns[CACHED_LEN], self._tokens[those, columns[COUNT] - 1]

    def advance(self, number: int, needs_values: NDArray[np.bool_]) -> list[int]:
        """Advances all members by the launched step `number`. Returns the numbers of those outside;
        their columns are not read before the next `look`."""
        columns, everyone = self._columns, self._everyone
        self._tokens[everyone, columns[COUNT]] = -1 - everyone
        columns[CACHED_LEN] += 1
        columns[COUNT] += 1
        columns[LAUNCHED_IN] = number
        columns[HELD_UNTIL, needs_values] = number
        outside: list[int] = np.flatnonzero(columns[UNTIL_LEN] == 0).tolist()
        return outside

    def settle(self, batch: Batch, known_lens: Column, token_ids: Column) -> list[int]:
        """Stores the token that each of a batch's first requests, all members at launch, sampled
        after its first `known_lens` tokens. Returns the indices of those that are not inside."""
        columns, numbers = self._columns, self._everyone
        if not len(self):
            return list(range(len(token_ids)))
        if batch is not self.batch:  # some have changed numbers, or have none (-1)
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
    """One forward pass, fully decided."""

    kind: StepKind
    number: int  # steps are counted from 1
    ends: int  # requests that had ended before this step
    batch: Batch
    cached_lens: Column  # of every request, before this step
    ids: NDArray[np.int32]  # the token of every row; -1 - k is sample k of the step before
    pages: tuple[GroupPages, ...]  # of every request
    members: int = 0  # number of the first requests, if these are all the members; else 0

    @property
    def work(self) -> BatchWork:
        batch = self.batch
        batch.tables = batch.tables or PageTables(self.kind.specs, len(batch.rows))
        return BatchWork(batch.shape, self.cached_lens, self.pages, batch.tables)


class StepBuilder:
    """A step being built: room for `size` rows and as many emitted ones. Pages are reserved."""

    def __init__(self, kind: StepKind, size: int) -> None:
        self.kind, self.tokens, self.emits = kind, size, size  # remaining room
        self.rows: list[ScheduledRows] = []
        self.cached_lens: list[Column | list[int]] = []  # parts to concatenate, like `ids`
        self.ids: list[Column | list[int]] = []
        self._single = False  # whether the last part of both is a list, for requests added singly
        self.pages: list[GroupPages] = []
        self.members = 0  # as in `ScheduledStep`

    def add(self, rows: ScheduledRows, ids: Sequence[int], cached_len: int = 0) -> None:
        """Adds a request's rows, with token `ids`, after `cached_len` keys."""
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
        """Requests that still fit, with one emitted row each."""
        return min(self.tokens, self.emits)

    def add_members(self, members: Decoding, begin: int, end: int) -> None:
        """Adds the next row of each of the members [begin, end)."""
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
