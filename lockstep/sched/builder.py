"""A step in the making: what it has room for, and what is in it: rows of members, as columns, and
of other requests. Whether pages are reserved is the affair of the scheduler, who alone uses it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.run.kind import StepKind
from lockstep.sched.decoding import Column, Decoding
from lockstep.sched.request import GroupPages, ScheduledRows


class StepBuilder:
    """Room for `size` rows, and for as many emitted ones, of steps of a kind."""

    def __init__(self, kind: StepKind, size: int) -> None:
        self.kind, self.tokens, self.emits = kind, size, size  # rows that there is still room for
        self.rows: list[ScheduledRows] = []
        self.cached_lens: list[Column | list[int]] = []  # behind one another, like the next
        self.ids: list[Column | Sequence[int]] = []
        self.pages: list[GroupPages] = []
        self.members = 0  # its first rows are those of all members

    def add(self, rows: ScheduledRows, ids: Sequence[int], cached_len: int = 0) -> None:
        """Rows whose pages are reserved, the tokens of which are `ids`, behind so many keys."""
        self.rows.append(rows)
        self.cached_lens.append([cached_len])
        self.ids.append(ids)
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
        cached_lens, ids = members.share(begin, end)
        self.rows += members.rows[begin:end]
        self.cached_lens.append(cached_lens)
        self.ids.append(ids)
        self.pages += members.pages[begin:end]
        self.tokens -= end - begin
        self.emits -= end - begin
