"""How deep to guess: as deep as it pays, by measured times and by each request's acceptance so far.

A row more in a step costs `row_s` seconds, a draft of depth i `draft_s(i)`; a token is worth what a
plain step pays for one. The i-th guess of a request is right with probability a^i, a being the
share of its guesses that were right lately. So depth i pays for the requests whose a^i is worth
their rows, and a depth is drafted if all levels up to it pay for themselves together. A request
for which nothing pays rests, and tries one guess again later. A draft that knows the chances of its
own guesses ends a chain by itself, where one more does not pay (`go_on`). All of this may depend on
the clock and on the batch: it decides how much is guessed, never what comes out.

Knows seconds and counts, no request; `speculation` asks it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

FORGET = 0.85  # of what was known, per verified draft
PRIOR = 2.0  # guesses that a request's share begins with
FIRST_SHARE = 0.7  # of an engine that has seen nothing
FIRST_CHANCE = 0.4  # the same: from which on a chain goes on
REST = 16  # steps until a resting request tries again; twice as many each time it fails
LONGEST_REST = 256
SMOOTH = 0.1  # weight of a new time
SEEN = 3  # times that make one known
OUTLIER = 4.0  # times above so many means count as that


@dataclass
class Acceptance:
    """Of one request, or of all."""

    share: float = FIRST_SHARE  # what it began with
    right: float = 0.0
    tried: float = 0.0
    rests_until: int = 0  # number of a step
    rest: int = REST

    @property
    def rate(self) -> float:
        """Probability that a guess is right if those above it are."""
        return (self.right + PRIOR * self.share) / (self.tried + PRIOR)

    def verified(self, tried: int, right: int) -> None:
        """So many guesses were tried in a step, of a request or of all, and so many right."""
        self.right = self.right * FORGET + right
        self.tried = self.tried * FORGET + tried
        if right:
            self.rest = REST

    def rests(self, settled: int) -> None:
        """Nothing pays: it tries again when so many steps more are settled."""
        self.rests_until = settled + self.rest
        self.rest = min(2 * self.rest, LONGEST_REST)


@dataclass
class Mean:
    """A smoothed time; of the first ones, which find everything cold, the shortest."""

    value: float = math.inf
    count: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count <= SEEN:
            self.value = min(self.value, seconds)
        else:
            self.value += (min(seconds, OUTLIER * self.value) - self.value) * SMOOTH


def rounded(rows: int) -> int:
    """Down to four bits: steps of about as many rows are one."""
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift


@dataclass
class Times:
    """Seconds of steps by their rows, about, and of drafts by their depth."""

    steps: dict[int, Mean] = field(default_factory=dict)
    drafts: dict[int, Mean] = field(default_factory=dict)

    def step(self, rows: int, seconds: float) -> None:
        self.steps.setdefault(rounded(rows), Mean()).add(seconds)

    def draft(self, depth: int, seconds: float) -> None:
        self.drafts.setdefault(depth, Mean()).add(seconds)

    def step_s(self, rows: int) -> float | None:
        """A step of so many rows; None if too few like it were seen."""
        mean = self.steps.get(rounded(rows))
        return mean.value if mean is not None and mean.count >= SEEN else None

    def row_s(self, count: int) -> float | None:
        """A row more in a step of `count`, by the wider step that was seen most."""
        plain_s, least = self.step_s(count), rounded(count)
        wider = {n: mean.count for n, mean in self.steps.items() if n > least}
        rows = max(wider, key=lambda n: wider[n], default=0)
        wide_s = self.step_s(rows)
        if plain_s is None or wide_s is None:
            return None
        return max(0.0, wide_s - plain_s) / (rows - count)

    def go_on(self, count: int) -> float:
        """The chance from which on a guess more pays in chains of `count` requests: it costs a row
        of each, and a step of the draft for all."""
        plain_s, row_s = self.step_s(count), self.row_s(count)
        seen = {depth: mean.value for depth, mean in self.drafts.items() if mean.count >= SEEN}
        if plain_s is None or row_s is None or not seen:
            return FIRST_CHANCE
        least, deepest = min(seen), max(seen)
        guess_s = seen[deepest] / deepest
        if least < deepest:  # without what every draft costs
            guess_s = max(0.0, seen[deepest] - seen[least]) / (deepest - least)
        return min(1.0, (guess_s + count * row_s) / plain_s)

    def draft_s(self, depth: int) -> float:
        """A draft of that depth, or of the nearest one that was seen, in proportion."""
        if not self.drafts:
            return 0.0
        near = min(self.drafts, key=lambda seen: abs(seen - depth))
        return self.drafts[near].value * (depth / near if depth < near else 1.0)


def depths(acceptances: Sequence[Acceptance], times: Times, most: int, nodes: int) -> list[int]:
    """How deep each of some requests, which decode together, is to guess: at most `most`, with a
    tree of `nodes` tokens then. What is not known yet, of plain steps or of wide ones, is tried."""
    count = len(acceptances)
    plain_s, one_s = times.step_s(count), times.row_s(count)
    if plain_s is None or one_s is None:
        return [0 if plain_s is None else most] * count
    token_s, row_s = plain_s / count, one_s * nodes / most
    gain, best_gain, best = 0.0, 0.0, 0
    for depth in range(1, most + 1):
        worth = [acceptance.rate**depth * token_s - row_s for acceptance in acceptances]
        gain += sum(each for each in worth if each > 0)
        if gain - times.draft_s(depth) > best_gain:
            best_gain, best = gain - times.draft_s(depth), depth
    return [
        max((d for d in range(1, best + 1) if acceptance.rate**d * token_s > row_s), default=0)
        for acceptance in acceptances
    ]
