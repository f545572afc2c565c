"""The engine's side of a draft: which requests are drafted for, how deep, and with what success.

Before a step is scheduled, every request that decodes and may speculate gets a tree, if its draft
has one; when a step has settled, the draft observes it. A request that is drafted for next is held
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

from lockstep.ops import concat
from lockstep.plan.build import paths
from lockstep.run.kind import GENERATE
from lockstep.run.runner import PLAIN, Runner
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import AcceptedTokens, DraftTree, Request, ScheduledRows, ScheduledStep
from lockstep.sched.scheduler import Scheduler
from lockstep.spec.depth import LONGEST_REST, REST, Acceptance, Costs, round_down
from lockstep.spec.draft import Draft, DraftRequest, SettledRows, SettledStep

Report = Callable[[str], None]
ANY_ID = 0  # the token of a chain's pads
OBSERVED_ROWS = 1 << 11  # most rows that a draft observes in one call: more delay the next step
FIRST_TRY = 128  # steps from a rest's start to a new request's try, which costs about 5 steps
TIMED_EVERY = 8  # while all rest, one step in this many is timed


@dataclass(frozen=True)
class TreeShape:
    """The largest size of a draft."""

    steps: int  # depth of the deepest token
    top_k: int  # tokens tried after each of the best nodes; 1 is a chain
    nodes: int  # tokens in all

    @property
    def depths(self) -> tuple[int, ...]:
        """The few lengths that recorded chains are rounded up to."""
        return tuple(sorted({1, 3, 7, self.steps} & {*range(self.steps + 1)}))

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows per request of recorded steps that decode, draft, extend and verify. One launch
        drafts a chain together with up to `steps` + 1 missing rows."""
        if self.top_k == 1:
            depths = self.depths
            return tuple(sorted({1, *(n + 1 for n in depths), *(self.steps + n for n in depths)}))
        return tuple(sorted({1, self.steps + 1, self.top_k, self.nodes + 1}))

    def rounded(self, steps: int) -> int:
        """Returns the shortest recorded chain of at least `steps` tokens; 0 for none."""
        return next(n for n in (0, *self.depths) if n >= steps)

    def deepest(self, room: int) -> int:
        """Returns the most steps of a draft, of one of `depths`, with `room` tokens; 0 for none."""
        if self.top_k > 1:
            return self.steps if self.nodes <= room else 0
        return max((n for n in self.depths if n <= room), default=0)

    def scratch(self, nodes: int) -> int:
        """Returns the scratch nodes that a request needs, for the target's or the draft's tree."""
        return 0 if self.top_k == 1 else max(nodes + 1, self.top_k * (self.steps - 1))


class Speculation:
    """Drafts for an engine's requests. Where verify launches are recorded (`Runner.uniform`), all
    drafts of a step have one length, and either all requests have one or none."""

    adaptive = True  # False: always as deep as the shape allows, for the lab and tests

    def __init__(
        self, draft: Draft, shape: TreeShape, runner: Runner, context_length: int, report: Report
    ) -> None:
        self.draft, self.shape = draft, shape
        self.costs: defaultdict[int, Costs] = defaultdict(Costs)  # by requests that decode, rounded
        self.runner, self.context_length = runner, context_length
        self._acceptance = Acceptance()  # of all requests
        self._acceptances: WeakKeyDictionary[Request, Acceptance] = WeakKeyDictionary()
        self._report: Report | None = report
        self._begun = 0.0  # start time of the next step to launch; 0: not timed
        self._begins: dict[int, tuple[float, int]] = {}  # start time and warmth per launched step
        self._ended = 0.0  # when the last step settled
        self._trying = False  # the next drafts are a try, not expected to pay
        self._first_try = 0  # number of the step from which a new request may try
        # the first of the plain steps by the same requests that the draft has not observed, and the
        # states of all of them; the other steps are dropped, so that their memory is reused
        self._first: ScheduledStep | None = None
        self._unobserved = list[Any]()

    def propose(self, scheduler: Scheduler, params_of: Callable[[Request], SamplingParams]) -> None:
        """Sets the draft of every request that may have one in the next step."""
        self._begun, number = 0.0, scheduler.settled
        if number % TIMED_EVERY and self._rests(self._acceptance, number):
            return
        begun = self._begun = time.perf_counter()
        if not (wanted := self._wanted(scheduler)):
            return
        shape, uniform, asks = self.shape, self.runner.uniform, list[DraftRequest]()
        costs, count = self._costs(scheduler)
        min_chance = costs.min_chance(len(wanted) / count) if self.adaptive else 0.0
        budget = scheduler.config.chunked_prefill_size - len(scheduler.running)
        if not uniform or scheduler.waiting or len(scheduler.running) > count:
            budget //= 2  # the other half is for prompts
        pad_rows = longest = 0
        if uniform:  # all draft, as deep as all may, or none
            most, pad_rows = shape.deepest(budget // len(wanted)), shape.steps
            if not most:
                self._acceptance.rests_until = number + REST
                return
            wanted = {request: min(steps, most) for request, steps in wanted.items()}
            longest = shape.rounded(max(wanted.values())) if shape.top_k == 1 else 0
        for request, steps in wanted.items():
            if budget < 1:
                break
            nodes = min(shape.nodes if shape.top_k > 1 else steps, budget)
            room = (request, max(steps, longest) + 1 + pad_rows, shape.scratch(nodes))
            if request.spec.draft and not scheduler.make_room(*room):
                continue
            budget -= nodes
            ask = DraftRequest(request, params_of(request), min(steps, nodes), nodes, min_chance)
            asks.append(ask)
        if not asks:
            return
        self._observe_plain()
        trees = self.draft.propose(asks)
        if uniform and shape.top_k == 1:
            trees = pad_chains(asks, trees, shape)
        for ask, tree in zip(asks, trees, strict=True):
            if tree.token_ids:
                ask.request.draft = tree
        self._begun = time.perf_counter()
        deepest = max(ask.steps for ask in asks)
        costs.draft.add(deepest, self._begun - begun, self.runner.warmth, self._trying)

    def hold(self, step: ScheduledStep) -> bool:
        """Holds every request that is drafted next until its sampled token is on the host. Returns
        whether that is every request of the step: then settling it late gains nothing."""
        uniform, alone = self.runner.uniform, True
        if self.adaptive and uniform:  # plain steps are timed as they will run: settled late
            measured = self.costs[round_down(len(step.batch.rows))].plain.known
            if not measured or self._rests(self._acceptance, step.number):
                return False
        for rows in step.batch.rows:
            request = rows.request
            asked = request.spec.speculative and rows.sampled > 0
            if asked and (uniform or not self._rests(self._acceptance_of(request), step.number)):
                request.held_until = max(request.held_until, step.number)
            else:
                alone = False
        return alone

    def launched(self, scheduler: Scheduler, step: ScheduledStep, hidden: Any) -> None:
        """Notes a launched step's start. Unless it is a try, lets the draft start the next chains
        and reserves their pages, whatever is accepted, before the host waits for this step."""
        if not self._begun or step.kind.name != GENERATE:
            return
        self._begins[step.number], batch = (self._begun, self.runner.warmth), step.batch
        if self._trying or not all(rows.chain for rows in batch.rows):
            return
        states = None if hidden is None else torch.as_tensor(hidden)
        self.draft.launched(batch.requests, batch.shape.width, states)
        if self.runner.uniform:
            for request in batch.requests:
                scheduler.make_room(request, batch.shape.width + 2 * self.shape.steps + 1, 0)

    def settled(self, step: ScheduledStep, accepted: AcceptedTokens, hidden: Any) -> None:
        """Takes in a settled step of the target: its time, its accepted drafts and its rows."""
        batch, plain = step.batch, step.members == len(step.batch.rows)
        now, (begun, warmth) = time.perf_counter(), self._begins.pop(step.number, (0.0, PLAIN))
        if begun and (plain or all(rows.new_len == 1 or rows.parents for rows in batch.rows)):
            depth, seconds = len(step.ids) / len(batch.rows) - 1, now - max(begun, self._ended)
            self.costs[round_down(len(batch.rows))].step(depth, seconds, warmth)
        self._ended = now
        if not plain or (self._first is not None and self._first.batch is not batch):
            self._observe_plain()
        if plain:
            self._first = self._first or step
            self._unobserved.append(hidden)
            if len(self._unobserved) >= min(self.draft.lag, OBSERVED_ROWS // len(batch.rows)):
                self._observe_plain()
            return
        entries, drafts, uniform = (
            list[SettledRows](),
            list[tuple[int, ...]](),
            self.runner.uniform,
        )
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
                    if not uniform:
                        self._acceptance_of(rows.request).verified(*drafts[-1])
            for request in drafting_requests(rows):
                entries.append(SettledRows(request, cached_len, tuple(kept)))
        if drafts:
            self._acceptance.verified(*map(sum, zip(*drafts, strict=True)))
        states = None if hidden is None else torch.as_tensor(hidden)
        self.draft.observe(SettledStep(tuple(entries), states))

    def forget(self) -> None:
        """Forgets steps and rests after an interruption: requests and steps start again."""
        self._first, self._unobserved, self._acceptance.rest = None, [], REST
        self._first_try = self._acceptance.rests_until = 0
        self._begins.clear()

    def _observe_plain(self) -> None:
        """Passes the steps in which the same requests decoded plainly to the draft, in one call."""
        first, unobserved = self._first, self._unobserved
        self._first, self._unobserved = None, []
        if first is None:
            return
        every, begins = first.batch.rows, first.cached_lens.tolist()
        width, states = len(every), [hidden for hidden in unobserved if hidden is not None]
        entries = [
            SettledRows(rows.request, begin, tuple(range(i, len(unobserved) * width, width)))
            for i, (rows, begin) in enumerate(zip(every, begins, strict=True))
            if drafting_requests(rows)
        ]
        self.draft.observe(SettledStep(tuple(entries), concat(states, 0) if states else None))

    # -- how deep

    def _wanted(self, scheduler: Scheduler) -> dict[Request, int]:
        """Returns the depth of draft to make for each request, of those that may have one."""
        shape, settled, uniform = self.shape, scheduler.settled, self.runner.uniform
        self._trying, most = False, dict[Request, int]()
        if uniform and self._rests(self._acceptance, settled):
            return {}
        for request in scheduler.running:
            if not request.spec.speculative or self._rests(self._acceptance_of(request), settled):
                continue  # other attributes may be in columns: do not read them
            if request.launched_in > settled or not request.decodes:
                continue
            deepest = request.left - 1
            if uniform:  # up to the context's end: accepted tokens are cut later
                deepest = self.context_length - len(request.tokens)
            if deepest > 0:
                most[request] = deepest
        if not self.adaptive:
            return {request: min(n, shape.steps) for request, n in most.items()}
        if not most:  # all rest until the first tries again; 0: a request that is ending
            own = [self._acceptance_of(r) for r in scheduler.running if r.spec.speculative]
            first = min([each.rests_until for each in own], default=0)
            self._acceptance.rests_until = first or self._acceptance.rests_until
            return {}
        together = dict[Acceptance, list[Request]]()  # requests that share a decision
        for request in most:
            together.setdefault(self._acceptance_of(request), []).append(request)
        costs, count = self._costs(scheduler)
        share = len(most) / count
        if self.draft.knows_chances:  # and ends its chains itself
            chosen = [shape.steps * pays for pays in costs.pays([*together], share)]
        else:
            chosen = costs.depths([*together], shape.steps, shape.nodes, share)
            if uniform and shape.top_k == 1:
                chosen = [shape.rounded(steps) for steps in chosen]
        wanted: dict[Request, int] = {}
        for (acceptance, requests), steps in zip(together.items(), chosen, strict=True):
            if steps:  # right tokens are not enough: drafts have to pay
                self._acceptance.rest, acceptance.rest, acceptance.rests_until = REST, REST, 0
            elif costs.plain.known:
                steps = self._tries(acceptance, settled)
            if steps:
                wanted |= {request: min(steps, most[request]) for request in requests}
        if wanted:  # not all rest; 0: never rested
            self._acceptance.rests_until = min(self._acceptance.rests_until, settled)
        return wanted

    def _costs(self, scheduler: Scheduler) -> tuple[Costs, int]:
        """Returns the costs of steps of all requests that decode now, resting and not speculating
        ones included, and their number. Takes no member out of its columns."""
        count = sum(r.members is not None or (r.decodes and r.left > 0) for r in scheduler.running)
        return self.costs[round_down(count)], count

    def _tries(self, acceptance: Acceptance, settled: int) -> int:
        """After a rest, returns the depth of a try, whatever it is worth; else starts a rest. Where
        all draft together a try has the full depth: a cheaper one tells little."""
        if acceptance.rests_until:
            acceptance.rests_until, self._trying = 0, True
            return self.shape.steps if self.draft.knows_chances or self.runner.uniform else 1
        acceptance.rests(settled)
        self._acceptance.rest, self._first_try = acceptance.rest, settled + FIRST_TRY
        if self._report is not None:  # once
            self._report(
                f"speculation does not pay: {acceptance.rate:.0%} of draft tokens are right; "
                f"decoding plainly, with a try every {REST} to {LONGEST_REST} steps"
            )
            self._report = None
        return 0

    def _rests(self, acceptance: Acceptance, settled: int) -> bool:
        return self.adaptive and acceptance.resting(settled)

    def _acceptance_of(self, request: Request) -> Acceptance:
        """Returns a request's acceptance; with `Runner.uniform` one for all. A new request starts
        with the rates of all, but may try FIRST_TRY steps after the last rest began."""
        if self.runner.uniform:
            return self._acceptance
        acceptance = self._acceptances.get(request)
        if acceptance is None:
            acceptance = self._acceptances[request] = self._acceptance.for_new_request()
            acceptance.rests_until = min(acceptance.rests_until, self._first_try)
        return acceptance


def pad_chains(
    asks: Sequence[DraftRequest], trees: Sequence[DraftTree], shape: TreeShape
) -> list[DraftTree]:
    """Pads chains with any token to the longest, rounded up to a recorded length: launches with
    this many rows per request are recorded."""
    longest, out = shape.rounded(max(len(tree.token_ids) for tree in trees)), list[DraftTree]()
    for ask, tree in zip(asks, trees, strict=True):
        pads = max(min(longest, ask.steps) - len(tree.token_ids), 0)
        ids = (*tree.token_ids, *[ANY_ID] * pads)
        out.append(DraftTree(ids, tuple(range(len(ids))), pads))
    return out


def drafting_requests(rows: ScheduledRows) -> list[Request]:
    """Returns the requests whose draft keys these rows extend: the request itself while it owns
    this page table, and the completions forked from it after these rows."""
    request = rows.request
    own = [request] if request.table is rows.table else []
    if rows.samples > 1:
        own += [each for each in request.siblings if each is not request and each.running]
    return own if request.spec.speculative else []
