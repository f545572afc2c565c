"""How deep to draft: as deep as it pays, by measured times and each request's acceptance so far.

A token is worth the plain step that it saves; a draft token costs a row of the verify step and a
step of the draft. A request for which no depth pays rests (decodes plainly) and tries again after
growing intervals. All of this may depend on the clock and on the batch: it decides how much is
drafted, never what is generated. Knows seconds and counts, no request; `speculation` calls it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from lockstep.run.runner import COLD, PLAIN, REPLAYED

FORGET = 0.92  # weight of earlier counts, per verified draft
RANGES, LONG_FORGET = 10, 0.98  # of `Chances`, and the weight of earlier counts there
PRIOR = 2.0  # drafts that a new request's counts start with
FIRST_CHANCE = 0.4  # at which a chain continues while costs are unknown
REST = 16  # steps of the first rest; each failed try doubles it
LONG_REST, LONGEST_REST = 256, 1024  # most steps of a rest; the first if drafts nearly pay
NEAR = 0.75  # worth that nearly pays, if also over half of the tokens are right
SMOOTH, SHORTER = 0.05, 0.25  # weight of a longer and a shorter time: noise only lengthens
SEEN = 3  # times that make a line known: the shortest of them counts, the others ran cold
OUTLIER = 1.5  # cap on a time, in estimates: a step may have waited for a prompt
FLAT = 0.1  # least variance of depths for measuring a slope


@dataclass(eq=False)
class Acceptance:
    """Decayed counts for one request, or for all: drafts, draft tokens, those tried (all before
    them were right), and those that were right."""

    drafts: float = PRIOR
    guesses: float = 2 * PRIOR
    tried: float = 2 * PRIOR
    right: float = 1.4 * PRIOR
    worth: float = 1.0  # what its drafts gain, relative to their cost
    rests_until: int = 0  # number of a step; 0: it does not rest
    rest: int = REST

    @property
    def rate(self) -> float:
        """Probability that a draft token is right if those before it are."""
        return self.right / self.tried

    def verified(self, drafts: int, guesses: int, tried: int, right: int) -> None:
        """Adds a step's drafts: their number, levels in all, tried tokens and right ones."""
        self.drafts = self.drafts * FORGET + drafts
        self.guesses = self.guesses * FORGET + guesses
        self.tried = self.tried * FORGET + tried
        self.right = self.right * FORGET + right

    def for_new_request(self) -> Self:
        """Returns the start of a new request: these rates with small counts, quick to change."""
        few, counts = PRIOR / self.drafts, ("drafts", "guesses", "tried", "right")
        return replace(self, **{name: few * getattr(self, name) for name in counts})

    def resting(self, settled: int) -> bool:
        """Whether it rests after step `settled`. Step numbers restart after an interruption."""
        return 0 < self.rests_until - settled <= LONGEST_REST

    def rests(self, settled: int) -> None:
        """Starts a rest: nothing pays. The try after it counts a third beside all before."""
        vars(self).update(vars(self.for_new_request()), rests_until=settled + self.rest)
        near = self.rate > 0.5 and self.worth > NEAR
        self.rest = min(2 * self.rest, LONG_REST if near else LONGEST_REST)


class Chances:
    """How often draft tokens were right, by the probability that the draft gave them, in ranges."""

    def __init__(self) -> None:
        self.seen = [PRIOR] * RANGES
        self.right = [PRIOR * (n + 0.5) / RANGES for n in range(RANGES)]

    def of(self, share: float) -> float:
        """Returns the chance of a token to which the draft gives probability `share`."""
        n = min(int(share * RANGES), RANGES - 1)
        return self.right[n] / self.seen[n]

    def add(self, share: float, right: bool) -> None:
        n = min(int(share * RANGES), RANGES - 1)
        self.seen[n] = self.seen[n] * LONG_FORGET + 1.0
        self.right[n] = self.right[n] * LONG_FORGET + right


@dataclass
class Line:
    """Seconds as a linear function of draft depth: smoothed means of x, y, x² and xy."""

    x: float = 0.0
    y: float = math.inf
    xx: float = 0.0
    xy: float = 0.0
    count: int = 0
    replayed: bool = False  # launches are replayed: other times do not count
    cold: bool = False  # launches will be replayed, but are not yet

    @property
    def known(self) -> bool:
        return self.count >= SEEN

    def add(self, depth: float, seconds: float, warmth: int = PLAIN, trial: bool = False) -> None:
        """Adds a measured time. A trial starts cold: its time counts only below the estimate."""
        if warmth == REPLAYED and not self.replayed:
            self.y, self.replayed = math.inf, True
        self.cold = warmth == COLD and not self.replayed
        about = self.y * max(1.0, depth / max(self.x, 1.0))  # deeper drafts may take longer
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
        """Whether only one depth was seen."""
        return self.xx - self.x * self.x < FLAT

    def slope(self, first: float) -> float:
        """Returns seconds per level; if only one depth was seen, from `first` at depth 0."""
        if self.flat:
            return max(0.0, self.y - first) / max(self.x, 1.0)
        return max(0.0, self.xy - self.x * self.y) / (self.xx - self.x * self.x)


@dataclass
class Costs:
    """Times by depth with about the same number of decoding requests: plain, verify, draft."""

    plain: Line = field(default_factory=Line)
    verify: Line = field(default_factory=Line)
    draft: Line = field(default_factory=Line)

    def step(self, depth: float, seconds: float, warmth: int = PLAIN) -> None:
        (self.verify if depth else self.plain).add(depth, seconds, warmth)

    @property
    def tried(self) -> bool:
        """Whether verify times are known, and replayed ones where plain steps are replayed."""
        cold = self.plain.replayed and (self.verify.cold or self.draft.cold)
        return self.verify.known and not cold

    @property
    def row_s(self) -> float:
        """Seconds that one more draft token of every request adds to the verify step."""
        return self.verify.slope(self.plain.y)

    @property
    def guess_s(self) -> float:
        """Seconds that it adds to drafting; 0 while unknown, or if only one depth was seen."""
        return self.draft.slope(self.draft.y) if self.draft.known else 0.0

    @property
    def first_s(self) -> float:
        """Fixed seconds of drafting and verifying, at any depth."""
        verify = self.verify.y - self.verify.x * self.row_s - self.plain.y
        draft = self.draft.y - self.draft.x * self.guess_s if self.draft.known else 0.0
        return max(0.0, verify) + max(0.0, draft)

    def min_chance(self, share: float = 1.0) -> float:
        """Returns the least chance at which one more draft token pays, if `share` of all draft."""
        if not (self.plain.known and self.tried and self.draft.known) or self.verify.flat:
            return FIRST_CHANCE
        return min(1.0, (self.guess_s / share + self.row_s) / self.plain.y)

    def depths(
        self, acceptances: Sequence[Acceptance], most: int, nodes: int, share: float = 1.0
    ) -> list[int]:
        """Returns each request's depth, at most `most` (a tree of `nodes` tokens). They are `share`
        of all that decode together. The i-th draft token is right with probability rate^i; all
        levels up to a depth have to pay together. Unknown times are measured first: plain steps,
        then drafts of depth `most`."""
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
        """Returns whether each one's drafts, which end by themselves, gain more than they cost;
        stores their worth. Fixed costs are shared by the requests that draft, `share` of all."""
        if not self.plain.known or not self.tried:
            return [self.plain.known] * len(acceptances)
        guess_s, first_s = self.row_s + self.guess_s / share, self.first_s / share
        for each in acceptances:
            cost_s = each.guesses * guess_s + each.drafts * first_s
            each.worth = each.right * self.plain.y / cost_s if cost_s else math.inf
        return [each.worth > 1.0 for each in acceptances]


def round_down(count: int) -> int:
    """Rounds down to four bits: steps with about this many requests share their costs."""
    shift = max(0, count.bit_length() - 4)
    return count >> shift << shift
