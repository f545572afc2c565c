"""The engine's side of a draft: who is asked for, how deep, and what came of it.

Before a step is scheduled, every request that decodes and may speculate gets a tree, if its draft
has one; when a step has settled, the draft is told. A request that will be asked for again is held
until its tokens have their values. Nothing here can change an answer. Knows requests, lengths,
times and the draft; the engine calls it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lockstep.ops import joined
from lockstep.plan.build import paths
from lockstep.run.kind import GENERATE
from lockstep.run.runner import PLAIN, Runner
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import AcceptedTokens, DraftTree, Request, ScheduledRows, ScheduledStep
from lockstep.sched.scheduler import Scheduler
from lockstep.spec.depth import LONGEST_REST, REST, Acceptance, Costs, rounded
from lockstep.spec.draft import Draft, DraftRequest, SettledRows, SettledStep

Report = Callable[[str], None]
ANY_ID = 0  # of a guess that nobody made
OBSERVED_ROWS = 1 << 11  # rows that a draft is told of at once: more would hold up the step behind
FIRST_TRY = 128  # steps from a rest that begins to the try of a new request, which costs some five
TIMED_EVERY = 8  # while all rest, one step of so many is timed


@dataclass(frozen=True)
class TreeShape:
    """How large a draft may be."""

    steps: int  # its deepest token
    top_k: int  # tokens that are tried behind each of the best; 1 is a chain
    nodes: int  # tokens in all

    @property
    def depths(self) -> tuple[int, ...]:
        """Of chains whose launches are recorded: few."""
        return tuple(sorted({1, 3, 7, self.steps} & {*range(self.steps + 1)}))

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows that a request may have in steps that decode, draft, extend and verify, where these
        are recorded. Those of a chain are guessed behind up to `steps` + 1 rows by one launch."""
        if self.top_k == 1:
            depths = self.depths
            return tuple(sorted({1, *(n + 1 for n in depths), *(self.steps + n for n in depths)}))
        return tuple(sorted({1, self.steps + 1, self.top_k, self.nodes + 1}))

    def rounded(self, steps: int) -> int:
        """A chain so long, or longer, that is recorded; 0 of none."""
        return next(n for n in (0, *self.depths) if n >= steps)

    def scratch(self, nodes: int) -> int:
        """Nodes that a request needs room for, of the target's tree or of the draft's own."""
        return 0 if self.top_k == 1 else max(nodes + 1, self.top_k * (self.steps - 1))


class Speculation:
    """Drafts of an engine's requests. Where launches that verify are recorded (`Runner.even`), all
    drafts of a step are as long, and it is all who guess or nobody."""

    adaptive = True  # off: always as deep as the shape allows; for the lab and for tests

    def __init__(
        self, draft: Draft, shape: TreeShape, runner: Runner, context_length: int, report: Report
    ) -> None:
        self.draft, self.shape = draft, shape
        self.costs: defaultdict[int, Costs] = defaultdict(Costs)  # by requests that decode, about
        self.runner, self.context_length = runner, context_length
        self._acceptance = Acceptance()  # of all requests
        self._acceptances: WeakKeyDictionary[Request, Acceptance] = WeakKeyDictionary()
        self._report: Report | None = report
        self._begun = 0.0  # when the step was begun that is launched next; 0: it is not timed
        self._begins: dict[int, tuple[float, int]] = {}  # of those under way, and how launched
        self._ended = 0.0  # when the last was settled
        self._trying = False  # what is asked for next is not expected to pay
        self._first_try = 0  # number of the step from which on a new request may try
        # the first of the steps in which the same requests decoded plainly, of which the draft does
        # not know yet, and the states of all; the other steps are let go, and share their memory
        self._first: ScheduledStep | None = None
        self._unobserved = list[Any]()

    def propose(self, scheduler: Scheduler, params_of: Callable[[Request], SamplingParams]) -> None:
        """Trees for whoever may have one in the next step."""
        self._begun, number = 0.0, scheduler.settled
        if number % TIMED_EVERY and self._rests(self._acceptance, number):
            return
        begun = self._begun = time.perf_counter()
        if not (wanted := self._wanted(scheduler)):
            return
        shape, even, asks = self.shape, self.runner.even, list[DraftRequest]()
        costs, count = self._costs(scheduler)
        go_on = costs.go_on(len(wanted) / count) if self.adaptive else 0.0
        budget = (scheduler.config.chunked_prefill_size - len(scheduler.running)) // 2
        behind = shape.steps if even else 0  # rows that make all as many, and of chains the longest
        longest = shape.rounded(max(wanted.values())) if even and shape.top_k == 1 else 0
        for request, steps in wanted.items():
            nodes = min(shape.nodes if shape.top_k > 1 else steps, budget)
            if nodes < 1:
                break
            room = (request, max(steps, longest) + 1 + behind, shape.scratch(nodes))
            if request.spec.draft and not scheduler.make_room(*room):
                continue
            budget -= nodes
            asks.append(DraftRequest(request, params_of(request), min(steps, nodes), nodes, go_on))
        if not asks:
            return
        self._observe_plain()
        trees = self.draft.propose(asks)
        if even and shape.top_k == 1:
            trees = evened(asks, trees, shape)
        for ask, tree in zip(asks, trees, strict=True):
            if tree.token_ids:
                ask.request.draft = tree
        self._begun = time.perf_counter()
        deepest = max(ask.steps for ask in asks)
        costs.draft.add(deepest, self._begun - begun, self.runner.warmth, self._trying)

    def hold(self, step: ScheduledStep) -> bool:
        """Who is to have a draft next waits until his token has its value. Whether all of them do,
        so that nothing is gained by settling the step late."""
        even, alone = self.runner.even, True
        if self.adaptive and even:  # plain steps are measured as they will be settled
            measured = self.costs[rounded(len(step.batch.rows))].plain.known
            if not measured or self._rests(self._acceptance, step.number):
                return False
        for rows in step.batch.rows:
            request = rows.request
            asked = request.spec.speculative and rows.sampled > 0
            if asked and (even or not self._rests(self._acceptance_of(request), step.number)):
                request.held_until = max(request.held_until, step.number)
            else:
                alone = False
        return alone

    def launched(self, scheduler: Scheduler, step: ScheduledStep, hidden: Any) -> None:
        """A step has been launched. Who only tries is not expected to go on; the others have room
        for the next chains, whatever is accepted, before anybody waits for these."""
        if not self._begun or step.kind.name != GENERATE:
            return
        self._begins[step.number], batch = (self._begun, self.runner.warmth), step.batch
        if self._trying or not all(rows.chain for rows in batch.rows):
            return
        states = None if hidden is None else torch.as_tensor(hidden)
        self.draft.launched(batch.requests, batch.shape.width, states)
        if self.runner.even:
            for request in batch.requests:
                scheduler.make_room(request, batch.shape.width + 2 * self.shape.steps + 1, 0)

    def settled(self, step: ScheduledStep, accepted: AcceptedTokens, hidden: Any) -> None:
        """A step of the target has settled."""
        batch, plain = step.batch, step.members == len(step.batch.rows)
        now, (begun, warmth) = time.perf_counter(), self._begins.pop(step.number, (0.0, PLAIN))
        if begun and (plain or all(rows.new_len == 1 or rows.parents for rows in batch.rows)):
            depth, seconds = len(step.ids) / len(batch.rows) - 1, now - max(begun, self._ended)
            self.costs[rounded(len(batch.rows))].step(depth, seconds, warmth)
        self._ended = now
        if not plain or (self._first is not None and self._first.batch is not batch):
            self._observe_plain()
        if plain:
            self._first = self._first or step
            self._unobserved.append(hidden)
            if len(self._unobserved) >= min(self.draft.lag, OBSERVED_ROWS // len(batch.rows)):
                self._observe_plain()
            return
        entries, drafts, even = list[SettledRows](), list[tuple[int, ...]](), self.runner.even
        columns = batch.rows, step.cached_lens.tolist(), batch.begins, batch.first_samples
        for rows, cached_len, begin, sample in zip(*columns, strict=False):
            kept: Sequence[int] = range(begin, begin + rows.new_len)
            if rows.parents is not None:
                nodes, deepest = accepted.sample(sample).nodes, rows.new_len - 1 - rows.request.pads
                kept = [begin + node for node in nodes]
                if not rows.chain:
                    deepest = max(map(len, paths(rows.parents, rows.new_len))) - 1
                if deepest > 0:
                    right = min(deepest, max(len(nodes) - 1, 0))
                    drafts.append((1, deepest, min(deepest, len(nodes)), right))
                    if not even:
                        self._acceptance_of(rows.request).verified(*drafts[-1])
            for request in drafting(rows):
                entries.append(SettledRows(request, cached_len, tuple(kept)))
        if drafts:
            self._acceptance.verified(*map(sum, zip(*drafts, strict=True)))
        states = None if hidden is None else torch.as_tensor(hidden)
        self.draft.observe(SettledStep(tuple(entries), states))

    def forget(self) -> None:
        """Requests and their steps begin anew, behind an interruption."""
        self._first, self._unobserved, self._acceptance.rest = None, [], REST
        self._first_try = self._acceptance.rests_until = 0
        self._begins.clear()

    def _observe_plain(self) -> None:
        """The draft is told of steps in which the same requests decoded plainly, all at once."""
        first, unobserved = self._first, self._unobserved
        self._first, self._unobserved = None, []
        if first is None:
            return
        every, begins = first.batch.rows, first.cached_lens.tolist()
        width, states = len(every), [hidden for hidden in unobserved if hidden is not None]
        entries = [
            SettledRows(rows.request, begin, tuple(range(i, len(unobserved) * width, width)))
            for i, (rows, begin) in enumerate(zip(every, begins, strict=True))
            if drafting(rows)
        ]
        self.draft.observe(SettledStep(tuple(entries), joined(states, 0) if states else None))

    # -- how deep

    def _wanted(self, scheduler: Scheduler) -> dict[Request, int]:
        """How deep a draft every request is to have, of those that may have one."""
        shape, settled, even = self.shape, scheduler.settled, self.runner.even
        self._trying, most = False, dict[Request, int]()
        if even and self._rests(self._acceptance, settled):
            return {}
        for request in scheduler.running:
            if not request.spec.speculative or self._rests(self._acceptance_of(request), settled):
                continue  # nothing else is asked: what moves is in columns
            if request.launched_in > settled or not request.decodes:
                continue
            deepest = request.left - 1
            if even:  # up to the context's end: what is accepted is cut
                deepest = self.context_length - len(request.tokens)
            if deepest > 0:
                most[request] = deepest
        if not self.adaptive:
            return {request: min(n, shape.steps) for request, n in most.items()}
        if not most:  # they rest until the first of them tries again; 0 is of who only ends
            own = [self._acceptance_of(r) for r in scheduler.running if r.spec.speculative]
            first = min([each.rests_until for each in own], default=0)
            self._acceptance.rests_until = first or self._acceptance.rests_until
            return {}
        together = dict[Acceptance, list[Request]]()  # who guesses, or does not, with whom
        for request in most:
            together.setdefault(self._acceptance_of(request), []).append(request)
        costs, count = self._costs(scheduler)
        share = len(most) / count
        if self.draft.knows_chances:  # and ends its chains by itself
            chosen = [shape.steps * pays for pays in costs.pays([*together], share)]
        else:
            chosen = costs.depths([*together], shape.steps, shape.nodes, share)
            if even and shape.top_k == 1:
                chosen = [shape.rounded(steps) for steps in chosen]
        wanted: dict[Request, int] = {}
        for (acceptance, requests), steps in zip(together.items(), chosen, strict=True):
            if steps:  # to be right sometimes is not enough: it has to pay
                self._acceptance.rest, acceptance.rest, acceptance.rests_until = REST, REST, 0
            elif costs.plain.known:
                steps = self._tries(acceptance, settled)
            if steps:
                wanted |= {request: min(steps, most[request]) for request in requests}
        if wanted:  # not all rest; 0 is of who has never rested
            self._acceptance.rests_until = min(self._acceptance.rests_until, settled)
        return wanted

    def _costs(self, scheduler: Scheduler) -> tuple[Costs, int]:
        """Of steps of all who decode now, those who rest and those who do not speculate too, and
        how many these are; who moves in columns is not taken out of them."""
        count = sum(r.members is not None or (r.decodes and r.left > 0) for r in scheduler.running)
        return self.costs[rounded(count)], count

    def _tries(self, acceptance: Acceptance, settled: int) -> int:
        """It has rested: a guess, whatever it is worth; or it rests from now on. Where all guess
        together they try what they would go on with: what less costs tells little."""
        if acceptance.rests_until:
            acceptance.rests_until, self._trying = 0, True
            return self.shape.steps if self.draft.knows_chances or self.runner.even else 1
        acceptance.rests(settled)
        self._acceptance.rest, self._first_try = acceptance.rest, settled + FIRST_TRY
        if self._report is not None:  # once
            self._report(
                f"speculation: guesses, {acceptance.rate:.0%} of them right, do not pay for their "
                f"rows; decoding plainly, with a try every {REST} to {LONGEST_REST} steps"
            )
            self._report = None
        return 0

    def _rests(self, acceptance: Acceptance, settled: int) -> bool:
        return self.adaptive and acceptance.resting(settled)

    def _acceptance_of(self, request: Request) -> Acceptance:
        """One of all, where all guess in the same launch. A new request begins with what is known
        of all, but may try when FIRST_TRY steps have settled since somebody began to rest."""
        acceptance = self._acceptance if self.runner.even else self._acceptances.get(request)
        if acceptance is None:
            acceptance = self._acceptances[request] = self._acceptance.other()
            acceptance.rests_until = min(acceptance.rests_until, self._first_try)
        return acceptance


def evened(
    asks: Sequence[DraftRequest], trees: Sequence[DraftTree], shape: TreeShape
) -> list[DraftTree]:
    """Chains as long as the longest of them, with any token behind those that are shorter: so many
    rows of every request are a launch that was recorded."""
    longest, out = shape.rounded(max(len(tree.token_ids) for tree in trees)), list[DraftTree]()
    for ask, tree in zip(asks, trees, strict=True):
        pads = max(min(longest, ask.steps) - len(tree.token_ids), 0)
        ids = (*tree.token_ids, *[ANY_ID] * pads)
        out.append(DraftTree(ids, tuple(range(len(ids))), pads))
    return out


def drafting(rows: ScheduledRows) -> list[Request]:
    """Whose keys some rows became: the request's, if it still has its pages, and those of
    completions that were forked off behind them."""
    request = rows.request
    own = [request] if request.table is rows.table else []
    if rows.samples > 1:
        own += [each for each in request.siblings if each is not request and each.running]
    return own if request.spec.speculative else []
