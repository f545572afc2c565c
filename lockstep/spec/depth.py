"""How deep to guess: as deep as it pays, by measured times and by each request's luck so far.

A row more in a step costs `row_s` seconds, a draft of depth i `draft_s(i)`; a token is worth what a
plain step pays for one. The i-th guess of a request is right with probability a^i, a being the
share of its guesses that were right lately. So depth i pays for the requests whose a^i is worth
their rows, and a depth is drafted if all levels up to it pay for themselves together. A request
for which nothing pays rests, and tries one guess again later. All of this may depend on the clock
and on the batch: it decides how much is guessed, never what comes out.

Knows seconds and counts, no request; `speculation` asks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FORGET = 0.85  # of what was known, per verified draft
PRIOR = 2.0  # guesses that a request's share begins with
FIRST_SHARE = 0.7  # of an engine that has seen nothing
REST = 16  # steps until a resting request tries again; twice as many each time it fails
LONGEST_REST = 256
SMOOTH = 0.1  # weight of a new time
SEEN = 3  # times that make a mean
OUTLIER = 4.0  # times above so many means count as that


@dataclass
class Luck:
    """Of one request, or of all."""

    share: float = FIRST_SHARE  # what it began with
    right: float = 0.0
    tried: float = 0.0
    rests_until: int = 0  # number of a step
    rest: int = REST

    @property
    def a(self) -> float:
        """Probability that a guess is right if those above it are."""
        return (self.right + PRIOR * self.share) / (self.tried + PRIOR)

    def verified(self, depth: int, accepted: int) -> None:
        """Of a path of `depth` guesses the first `accepted` were right."""
        self.right = self.right * FORGET + accepted
        self.tried = self.tried * FORGET + min(depth, accepted + 1)
        if accepted:
            self.rest = REST

    def rests(self, settled: int) -> None:
        """Nothing pays: it tries again when so many steps more are settled."""
        self.rests_until = settled + self.rest
        self.rest = min(2 * self.rest, LONGEST_REST)


@dataclass
class Mean:
    """A smoothed time."""

    value: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count > 2:
            seconds = min(seconds, OUTLIER * self.value)
        self.value += (seconds - self.value) * max(SMOOTH, 1 / self.count)


@dataclass
class Times:
    """Seconds of steps by their rows, in powers of two, and of drafts by their depth."""

    steps: dict[int, Mean] = field(default_factory=dict)
    drafts: dict[int, Mean] = field(default_factory=dict)

    def step(self, rows: int, seconds: float) -> None:
        self.steps.setdefault(rows.bit_length(), Mean()).add(seconds / rows)

    def draft(self, depth: int, seconds: float) -> None:
        self.drafts.setdefault(depth, Mean()).add(seconds)

    def step_s(self, rows: int) -> float | None:
        """A step of so many rows; None if too few like it were seen."""
        mean = self.steps.get(rows.bit_length())
        return mean.value * rows if mean is not None and mean.count >= SEEN else None

    def draft_s(self, depth: int) -> float:
        """A draft of that depth, or of the nearest one that was seen, in proportion."""
        if not self.drafts:
            return 0.0
        near = min(self.drafts, key=lambda seen: abs(seen - depth))
        return self.drafts[near].value * (depth / near if depth < near else 1.0)


def depths(lucks: Sequence[Luck], times: Times, most: int, nodes: int) -> list[int]:
    """How deep each of some requests, which decode together, is to guess: at most `most`, with a
    tree of `nodes` tokens then. What is not known yet, of plain steps or of wide ones, is tried."""
    count = len(lucks)
    plain_s, wide_s = times.step_s(count), times.step_s(count * (nodes + 1))
    if plain_s is None or wide_s is None:
        return [0 if plain_s is None else most] * count
    row_s = max(0.0, wide_s - plain_s) / (count * most)
    token_s = plain_s / count
    gain, best_gain, best = 0.0, 0.0, 0
    for depth in range(1, most + 1):
        worth = [luck.a**depth * token_s - row_s for luck in lucks]
        gain += sum(each for each in worth if each > 0)
        if gain - times.draft_s(depth) > best_gain:
            best_gain, best = gain - times.draft_s(depth), depth
    return [
        max((d for d in range(1, best + 1) if luck.a**d * token_s > row_s), default=0)
        for luck in lucks
    ]
