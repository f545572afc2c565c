"""Drafts from the text itself: a chain of the tokens that followed the last similar place.

Looks up the longest run of the last few tokens that occurred before; a wrong draft costs the rows
that verify it, and nothing else. Knows token ids; `Speculation` calls it.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from lockstep.sched.request import DraftTree, Request
from lockstep.spec.draft import NO_DRAFT, Draft, DraftRequest

LONGEST, SHORTEST = 5, 2  # tokens that have to match


class Index:
    """For one text, where each short run of its tokens last ended, except at the text's end."""

    def __init__(self) -> None:
        self.known_len = 0  # tokens that were indexed
        self.ends: dict[tuple[int, ...], int] = {}

    def find(self, tokens: Sequence[int]) -> int | None:
        """Returns the index after the last occurrence of the longest known run of last tokens. Runs
        that end with the last token are not added yet: they would only find themselves."""
        for end in range(max(self.known_len, 1), len(tokens)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self.ends[tuple(tokens[end - n : end])] = end
        self.known_len = len(tokens)
        last = [tuple(tokens[-n:]) for n in range(LONGEST, SHORTEST - 1, -1)]
        return next((self.ends[run] for run in last if run in self.ends), None)


class NgramDraft(Draft):
    """Drafts chains of tokens from earlier text, which it indexes when a draft is wanted."""

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Request, Index] = WeakKeyDictionary()

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._chain(ask) for ask in requests]

    def _chain(self, ask: DraftRequest) -> DraftTree:
        tokens = ask.request.tokens
        if (end := self._indexes.setdefault(ask.request, Index()).find(tokens)) is None:
            return NO_DRAFT
        period = len(tokens) - end  # a copy that reaches the text's end repeats from its start
        ids = [tokens[end + i % period] for i in range(ask.steps)]
        return DraftTree(tuple(ids), tuple(range(ask.steps)))
