"""Requests that decode, as columns: a step moves their lengths and tokens all at once.

Members are the running requests that miss one row and sample one token with it, by rank. A member
is inside, its lengths and tokens in the columns alone, up to a length at which it needs a page or
may end, or until somebody asks the request for them. Pages are the scheduler's, who calls this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lockstep.sched.request import Batch, GroupPages, Request, ScheduledRows

Column = NDArray[np.int64]

# what moves while a request decodes
MOVING = ("tokens", "cached_len", "settled_len", "launched_in", "held_until")
# The columns' rows. The request keeps its first KNOWN_LEN tokens, COUNT more are here. Below
# UNTIL_LEN nothing but decoding happens; it is 0 of a member that is outside.
CACHED_LEN, SETTLED_LEN, LAUNCHED_IN, HELD_UNTIL, KNOWN_LEN, COUNT, UNTIL_LEN = range(7)
MOST = 64  # tokens that are here at most


def waits(held_until: Any, settled: int) -> Any:
    """Whether a step behind number `settled` has to be settled first. Of an int or an array."""
    return held_until > settled


class Decoding:
    """The members, and what a step of all of them is made of."""

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
