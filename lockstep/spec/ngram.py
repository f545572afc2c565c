"""Drafts from the text itself: what followed the last time that it read like this, a chain.

The longest of the last few tokens that stand somewhere before are looked up; a wrong guess costs
the rows that verify it, and nothing else. Knows token ids; the engine calls it.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from lockstep.sched.request import DraftTree, Request
from lockstep.spec.draft import NO_DRAFT, Draft, DraftRequest

LONGEST, SHORTEST = 5, 2  # tokens that have to be the same


class Index:
    """Of one text: where every short run of its tokens ended last, its very end left out."""

    def __init__(self) -> None:
        self.known_len = 0  # tokens that were looked at
        self.ends: dict[tuple[int, ...], int] = {}

    def find(self, tokens: Sequence[int]) -> int | None:
        """Behind which token the longest known run of the last ones ended. The runs that end with
        the last token are not taken in yet: they would only find themselves."""
        for end in range(max(self.known_len, 1), len(tokens)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self.ends[tuple(tokens[end - n : end])] = end
        self.known_len = len(tokens)
        last = [tuple(tokens[-n:]) for n in range(LONGEST, SHORTEST - 1, -1)]
        return next((self.ends[run] for run in last if run in self.ends), None)


class NgramDraft(Draft):
    """A chain of tokens that were there before: they are looked at when it is wanted."""

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Request, Index] = WeakKeyDictionary()

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._chain(ask) for ask in requests]

    def _chain(self, ask: DraftRequest) -> DraftTree:
        tokens = ask.request.tokens
        if (end := self._indexes.setdefault(ask.request, Index()).find(tokens)) is None:
            return NO_DRAFT
        period = len(tokens) - end  # what reaches into the end of the text goes on as it began
        ids = [tokens[end + i % period] for i in range(ask.steps)]
        return DraftTree(tuple(ids), tuple(range(ask.steps)))
