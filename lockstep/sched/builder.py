"""A step in the making: what it has room for, and what is in it.

Rows of members come many at a time, as columns, those of other requests one by one. Knows counts;
whether pages are reserved is the scheduler's affair, who alone uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.run.kind import StepKind
from lockstep.sched.decoding import Column, Decoding
from lockstep.sched.request import GroupPages, ScheduledRows
from lockstep.types import RuleError


@dataclass(frozen=True)
class Limits:
    """How much a step may hold. `chunked_prefill_size` bounds its rows, decoding ones included, and
    its emitted rows."""

    chunked_prefill_size: int = 512
    max_running_requests: int = 64
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if min(self.chunked_prefill_size, self.max_running_requests) < 1:
            rule = "chunked_prefill_size and max_running_requests are at least 1"
            sizes = f"{self.chunked_prefill_size} and {self.max_running_requests}"
            raise RuleError(rule, sizes, "Raise the one below 1")


class StepBuilder:
    """Up to `size` rows, and as many emitted ones, of steps of a kind."""

    def __init__(self, kind: StepKind, size: int) -> None:
        self.kind, self.size = kind, size
        self.rows: list[ScheduledRows] = []
        self.cached_lens: list[Column | list[int]] = []  # behind one another, like the next
        self.ids: list[Column | Sequence[int]] = []
        self.pages: list[GroupPages] = []
        self._tokens = 0
        self._more_emits = 0  # than one of every request
        self.members = 0  # its first rows are those of all members

    @property
    def tokens(self) -> int:
        """Rows that there is still room for."""
        return self.size - self._tokens

    @property
    def emits(self) -> int:
        """Emitted rows that there is still room for."""
        return self.size - len(self.rows) - self._more_emits

    def add(self, rows: ScheduledRows, ids: Sequence[int], cached_len: int = 0) -> None:
        """Rows whose pages are reserved, the tokens of which are `ids`, behind so many keys."""
        self.rows.append(rows)
        self.cached_lens.append([cached_len])
        self.ids.append(ids)
        self._tokens += len(ids)
        groups, table = self.kind.groups, rows.table
        self.pages.append(table.views(groups) if table is not None else (None,) * len(groups))
        self._more_emits += len(rows.emit) - 1

    @property
    def room(self) -> int:
        """Requests that there is still room for, with a row each that is emitted."""
        return min(self.tokens, self.emits)

    def add_members(self, members: Decoding, begin: int, end: int) -> None:
        """The next rows of members [begin, end)."""
        cached_lens, ids = members.share(begin, end)
        self.rows += members.rows[begin:end]
        self.cached_lens.append(cached_lens)
        self.ids.append(ids)
        self.pages += members.pages[begin:end]
        self._tokens += end - begin
