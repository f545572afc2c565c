"""How deep to guess: as deep as it pays, by measured times and by each request's drafts so far.

A token is worth what a plain step pays for one; a guess costs a row of the step that verifies it
and a step of the draft. A request for which nothing pays rests, and tries again later and later.
All of this may depend on the clock and on the batch: it decides how much is guessed, never what
comes out. Knows seconds and counts, no request; `speculation` asks it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from lockstep.run.runner import COLD, PLAIN, REPLAYED

FORGET = 0.92  # of what was known, per verified draft
RANGES, LONG_FORGET = 10, 0.98  # of chances, and how long a guess counts there
PRIOR = 2.0  # drafts of others that a request's own begin with
FIRST_CHANCE = 0.4  # from which on a chain goes on, of an engine that has seen nothing
REST = 16  # steps until a resting request tries again; twice as many each time it fails
LONG_REST, LONGEST_REST = 256, 1024  # the first where they bring nearly what they cost
NEAR = 0.75  # of it, at least, and half of them right
SMOOTH, SHORTER = 0.05, 0.25  # weight of a new time, and of a shorter one: others only add to it
SEEN = 3  # times that make one known: at first the shortest counts, the others found all cold
OUTLIER = 1.5  # times above so many means count as that: one that waited for a prompt is no rule
FLAT = 0.1  # variance of sizes that a slope is measured by, at least


@dataclass(eq=False)
class Acceptance:
    """Drafts of one request, or of all: their number, guesses, those that were tried, those that
    were right; what lies back counts less."""

    drafts: float = PRIOR
    guesses: float = 2 * PRIOR
    tried: float = 2 * PRIOR
    right: float = 1.4 * PRIOR
    worth: float = 1.0  # what its guesses bring, of what they cost
    rests_until: int = 0  # number of a step
    rest: int = REST

    @property
    def rate(self) -> float:
        """Probability that a guess is right if those above it are."""
        return self.right / self.tried

    def verified(self, drafts: int, guesses: int, tried: int, right: int) -> None:
        """So many drafts of a step, `guesses` deep together."""
        self.drafts = self.drafts * FORGET + drafts
        self.guesses = self.guesses * FORGET + guesses
        self.tried = self.tried * FORGET + tried
        self.right = self.right * FORGET + right

    def other(self) -> Self:
        """Of a request that has seen nothing yet: like these, and quick to be otherwise."""
        few, counts = PRIOR / self.drafts, ("drafts", "guesses", "tried", "right")
        return replace(self, **{name: few * getattr(self, name) for name in counts})

    def resting(self, settled: int) -> bool:
        """When so many steps are settled; they are counted anew behind an interruption."""
        return 0 < self.rests_until - settled <= LONGEST_REST

    def rests(self, settled: int) -> None:
        """Nothing pays: it tries again when so many steps more are settled. What it finds then
        counts a third beside what was before."""
        vars(self).update(vars(self.other()), rests_until=settled + self.rest)
        near = self.rate > 0.5 and self.worth > NEAR
        self.rest = min(2 * self.rest, LONG_REST if near else LONGEST_REST)


class Chances:
    """How often guesses were right, by what the draft gave them: in so many ranges."""

    def __init__(self) -> None:
        self.seen = [PRIOR] * RANGES
        self.right = [PRIOR * (n + 0.5) / RANGES for n in range(RANGES)]

    def of(self, share: float) -> float:
        """The chance of a guess that the draft gives this share."""
        n = min(int(share * RANGES), RANGES - 1)
        return self.right[n] / self.seen[n]

    def add(self, share: float, right: bool) -> None:
        n = min(int(share * RANGES), RANGES - 1)
        self.seen[n] = self.seen[n] * LONG_FORGET + 1.0
        self.right[n] = self.right[n] * LONG_FORGET + right


@dataclass
class Line:
    """Seconds by the depth of drafts, smoothed: means of both, of the square and of the product."""

    x: float = 0.0
    y: float = math.inf
    xx: float = 0.0
    xy: float = 0.0
    count: int = 0
    replayed: bool = False  # since launches are, others tell nothing
    cold: bool = False  # they will be

    @property
    def known(self) -> bool:
        return self.count >= SEEN

    def add(self, depth: float, seconds: float, warmth: int = PLAIN, trial: bool = False) -> None:
        """Of a trial, which begins cold, only what is shorter than was known counts."""
        if warmth == REPLAYED and not self.replayed:
            self.y, self.replayed = math.inf, True
        self.cold = warmth == COLD and not self.replayed
        about = self.y * max(1.0, depth / max(self.x, 1.0))  # a deeper one may take longer
        later = trial and self.known and seconds > about
        if later or seconds <= 0.0 or (self.replayed and warmth != REPLAYED):
            return
        most, weight = self.y, 1.0
        if self.known and self.y < math.inf:
            most, weight = OUTLIER * about, SMOOTH if seconds > about else SHORTER
        seconds, self.count, old = min(seconds, most), self.count + 1, 1.0 - weight
        self.y = seconds if old == 0.0 else self.y * old + seconds * weight
        self.x = self.x * old + depth * weight
        self.xx = self.xx * old + depth * depth * weight
        self.xy = self.xy * old + depth * seconds * weight

    @property
    def flat(self) -> bool:
        """Whether one depth alone was seen."""
        return self.xx - self.x * self.x < FLAT

    def slope(self, first: float) -> float:
        """Seconds of one more; from `first` at 0 on, if one depth alone was seen."""
        if self.flat:
            return max(0.0, self.y - first) / max(self.x, 1.0)
        return max(0.0, self.xy - self.x * self.y) / (self.xx - self.x * self.x)


@dataclass
class Costs:
    """Of steps in which so many decode: plain ones, those that verify, and drafts, by depth."""

    plain: Line = field(default_factory=Line)
    wide: Line = field(default_factory=Line)
    draft: Line = field(default_factory=Line)

    def step(self, depth: float, seconds: float, warmth: int = PLAIN) -> None:
        (self.wide if depth else self.plain).add(depth, seconds, warmth)

    @property
    def tried(self) -> bool:
        """Whether steps that verify are known; as they will be, where plain ones are."""
        cold = self.plain.replayed and (self.wide.cold or self.draft.cold)
        return self.wide.known and not cold

    @property
    def row_s(self) -> float:
        """A guess more of every request in the step that verifies them."""
        return self.wide.slope(self.plain.y)

    @property
    def guess_s(self) -> float:
        """The same in the draft; nothing, as far as is known, where all were as deep."""
        return self.draft.slope(self.draft.y) if self.draft.known else 0.0

    @property
    def first_s(self) -> float:
        """What drafting costs at any depth."""
        wide = self.wide.y - self.wide.x * self.row_s - self.plain.y
        draft = self.draft.y - self.draft.x * self.guess_s if self.draft.known else 0.0
        return max(0.0, wide) + max(0.0, draft)

    def go_on(self, share: float = 1.0) -> float:
        """The chance from which on a guess more pays, if this share of all guess."""
        if not (self.plain.known and self.tried and self.draft.known) or self.wide.flat:
            return FIRST_CHANCE
        return min(1.0, (self.guess_s / share + self.row_s) / self.plain.y)

    def depths(
        self, acceptances: Sequence[Acceptance], most: int, nodes: int, share: float = 1.0
    ) -> list[int]:
        """How deep each of some requests is to guess, which are this share of all that decode
        together: at most `most`, with a tree of `nodes` tokens then. The i-th guess is right with
        probability rate^i; all levels up to a depth pay together. What is not known yet, of plain
        steps or wide, is tried."""
        if not self.plain.known or not self.tried:
            return [most if self.plain.known else 0] * len(acceptances)
        count = len(acceptances) / share
        token_s, row_s = self.plain.y / count, self.row_s * nodes / most / count
        levels = range(1, most + 1)
        worth = [[each.rate**depth * token_s - row_s for depth in levels] for each in acceptances]
        gain, best_gain, best = -self.first_s, 0.0, 0
        for depth, level in zip(levels, zip(*worth, strict=True), strict=True):
            gain += sum(each for each in level if each > 0) - self.guess_s
            if gain > best_gain:
                best_gain, best = gain, depth
        return [sum(each > 0 for each in own[:best]) for own in worth]

    def pays(self, acceptances: Sequence[Acceptance], share: float = 1.0) -> list[bool]:
        """Whose drafts, which end by themselves, bring more than they cost; notes their worth. What
        a draft costs at any number is borne by those who guess, this share of all."""
        if not self.plain.known or not self.tried:
            return [self.plain.known] * len(acceptances)
        guess_s, first_s = self.row_s + self.guess_s / share, self.first_s / share
        for each in acceptances:
            cost_s = each.guesses * guess_s + each.drafts * first_s
            each.worth = each.right * self.plain.y / cost_s if cost_s else math.inf
        return [each.worth > 1.0 for each in acceptances]


def rounded(count: int) -> int:
    """Down to four bits: steps of about as many requests are one."""
    shift = max(0, count.bit_length() - 4)
    return count >> shift << shift
