"""Drafts by a model: its rows are ordinary plans, through the target's runner.

The model has its own groups in the requests' tables and has computed `PageTable.draft_len` keys.
Missing rows are computed first, with the target's hidden states if the model reads them; the last
one gives the first draft token. A chain's further rows are in the pages, after every committed key;
a tree's are in scratch pages. Keys of accepted tokens are computed again. A draft token is the
model's own sample with the target's noise; in a tree, the best few. Knows requests, plans and one
`DraftModel`; `speculation` calls it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.kv.tables import PageTable
from lockstep.models.loader import Info
from lockstep.ops import concat, copy_into, to_device
from lockstep.plan.build import BatchShape, BatchWork, PageTables, build, slice_plan
from lockstep.plan.step import StepPlan, ints
from lockstep.run.kind import StepKind
from lockstep.run.runner import GUESSES, Chain, Runner, StepOutput
from lockstep.sample import sampler
from lockstep.sample.formulas import NO_TOKEN
from lockstep.sample.sampler import RowBatch, RowParams, Settings
from lockstep.sched.request import DraftTree, Request
from lockstep.spec.depth import Chances
from lockstep.spec.draft import NO_DRAFT, Draft, DraftModel, DraftRequest, SettledStep

KEPT, LEAST = 1 << 11, 8  # target states that are kept: per step, and at least per request
ENDS = (1, 3)  # lengths at which chains may end, besides `steps`
LIKELY = 64  # candidate tokens per row of a tree
SPARSE = 64  # above this many rows per request, the few kept states get memory of their own

Path = tuple[int, ...]  # draft tokens, from the first level down
Best = tuple[list[list[float]], list[list[int]]]  # log-probabilities and tokens, a few per row


class DraftState(NamedTuple):
    """What is known beyond a table's `draft_len`. It belongs to the table
    (`PageTable.draft_state`), and a fork starts with its parent's.

    begin    position of the first of the target's states that are kept: the last computed row's, if
             there is one, and those of rows that are still to be computed
    hidden   per kept state, all states of its step (no pairs with rows: so many short-lived objects
             would make Python's collector scan its whole heap)
    rows     per kept state, its row in that step
    shares   the probabilities that the model gave the last chain's tokens, and their `Chances`
    """

    begin: int
    hidden: tuple[Tensor, ...] = ()
    rows: tuple[int, ...] = ()
    shares: tuple[tuple[Chances, float], ...] = ()

    @classmethod
    def of(cls, table: PageTable) -> "DraftState":
        state: DraftState | None = table.draft_state
        return cls(table.draft_len) if state is None else state

    def drop_before(self, begin: int) -> "DraftState":
        """Returns the state without rows before position `begin`."""
        gone = max(0, begin - self.begin)
        return DraftState(self.begin + gone, self.hidden[gone:], self.rows[gone:], self.shares)


class Chains(NamedTuple):
    """Chains of `guesses` draft tokens for each of some requests, made by one launch: token i of
    request k, of `slots` with the pads, is sample GUESSES + i * slots + k of the runner. Early
    chains follow what the target samples in step `number`; it is 0 for others."""

    requests: list[Request]
    how: RowParams
    guesses: int
    slots: int
    number: int = 0

    def tree(self, k: int, steps: int) -> DraftTree:
        """Returns the first `steps` draft tokens of request k, or all, as sample ids."""
        ids = [-1 - GUESSES - k - i * self.slots for i in range(min(steps, self.guesses))]
        return DraftTree(tuple(ids), tuple(range(len(ids))))


class Beam:
    """A request's draft while it grows. A node is the path of tokens that ends with it, scored by
    its summed log-probability. Children of `level` are next; a chain's level is one node."""

    def __init__(self, ask: DraftRequest, top_k: int) -> None:
        self.ask, self.table, self.top_k = ask, table_of(ask.request), top_k
        self.scores: dict[Path, float] = {(): 0.0}  # the root: the request's last token
        self.level: list[Path] = [()]
        self.computed: list[Path] = []  # in order, the level's last

    @property
    def parents(self) -> tuple[int, ...]:
        """The parent of every computed node; -1 is the request's last token."""
        at = {path: i for i, path in enumerate(self.computed)}
        return tuple([at.get(path[:-1], -1) for path in self.computed])

    def grow(self, scores: Sequence[Sequence[float]], ids: Sequence[Sequence[int]]) -> list[int]:
        """Adds children to every node of the level; the best become the next level. Returns the
        index of the parent of each in the level before."""
        children = {
            (*path, token): self.scores[path] + score
            for path, own_scores, own_ids in zip(self.level, scores, ids, strict=True)
            for token, score in zip(own_ids, own_scores, strict=True)
            if score > float("-inf")
        }
        self.scores |= children
        before, self.level = self.level, self._best(children, self.top_k)
        self.computed += self.level
        return [before.index(path[:-1]) for path in self.level]

    def tree(self) -> DraftTree:
        """Returns the best of all nodes as a tree."""
        root, *guesses = self.scores
        kept = [root, *self._best(guesses, self.ask.nodes)]
        ids = [path[-1] for path in kept[1:]]
        return DraftTree(tuple(ids), tuple([kept.index(path[:-1]) for path in kept[1:]]))

    def _best(self, paths: Iterable[Path], count: int) -> list[Path]:
        """Returns the best paths first: a parent scores no less than its child and precedes it."""
        return sorted(paths, key=self.scores.__getitem__, reverse=True)[:count]


class ModelDraft:
    """A `Draft` by a model: chains, or trees of the `top_k` best tokens. A step has at most `rows`
    rows; `steps` is the greatest depth."""

    def __init__(
        self, model: DraftModel, runner: Runner, top_k: int, steps: int, rows: int, info: Info
    ) -> None:
        self.model, self.runner, self.top_k, self.rows = model, runner, top_k, rows
        self.steps, self.vocab_size, self.eos_ids = steps, info.vocab_size, info.eos_token_ids
        self.ahead = int(bool(model.target_layers))
        # with a window no row may lag: its pages are kept from the draft's length on
        self.eager = any(spec.window is not None for spec in model.kind.specs)
        self.lag = 1 if self.eager else Draft.lag
        self._how: tuple[list[Request], RowParams] | None = None  # of the requests that asked last
        self._pages: tuple[list[PageTable], PageTables] | None = None  # of the step before
        # chains that the next step verifies; once it is launched, the early ones after them
        self._made: Chains | None = None
        self._chances = Chances(), Chances()  # of tokens without noise, and with

    @property
    def knows_chances(self) -> bool:
        """Whether each chain ends by its own chances; with `Runner.uniform` all have one length."""
        return self.top_k == 1 and not self.runner.uniform

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        made, self._made = self._made, None
        if made is not None and made.number and (trees := self._take_early_chains(made, requests)):
            return trees
        able = [ask for ask in requests if self._ready(ask.request)]
        asks = able[: self.rows // self.top_k]  # a level of a tree has top_k rows
        grown = self._grow_drafts(asks) if asks else []
        found = dict(zip([ask.request for ask in asks], grown, strict=True))
        return [found.get(ask.request, NO_DRAFT) for ask in requests]

    def observe(self, settled: SettledStep) -> None:
        behind, hidden, due = dict[Request, int](), settled.hidden, False
        most = max(LEAST, self.steps + 2, KEPT // max(1, len(settled.rows)))
        for request, begin, rows in settled.rows:
            table = table_of(request)
            state = DraftState.of(table)
            for nth, (known, share) in enumerate(state.shares[: len(rows)]):
                known.add(share, right=nth < len(rows) - 1)
            kept, at = state.hidden, state.rows
            if hidden is not None and begin == state.begin + len(kept):
                kept, at = kept + (hidden,) * len(rows), at + rows
            table.draft_state = DraftState(state.begin, kept, at)
            # a head's last row is computed with the next draft: it gives the first token
            end = begin + len(rows) - self.ahead
            lazy = end + self.ahead > len(request.spec.prompt) and not self.eager
            missing = end - table.draft_len
            if missing >= (most // 2 if lazy else 1) and self._able(table, table.draft_len, end):
                behind[request] = end
                due |= not lazy or missing >= most
        if due:  # then for all that are at least half due
            self._catch_up(behind)
        long = any(len(each.rows) > SPARSE for each in settled.rows)
        if hidden is not None and (long or len(hidden) > SPARSE * len(settled.rows)):
            self._compact([table_of(each.request) for each in settled.rows])

    def _end(self, request: Request) -> int:
        """Returns where the rows of a request that asks end: all its tokens have values."""
        return len(request.tokens) - self.ahead

    def _able(self, table: PageTable, begin: int, end: int) -> bool:
        """Whether rows [begin, end) can be computed: the target's states are kept, or not read."""
        state = DraftState.of(table)
        kept = state.begin <= begin and end <= state.begin + len(state.hidden)
        return kept or not self.ahead

    def _ready(self, request: Request) -> bool:
        """Whether the rows up to the last token's can be computed now. That row is computed again
        if it was computed before and its logits were not used."""
        table, end = table_of(request), self._end(request)
        begin = min(table.draft_len, end - 1)
        if able := self._able(table, begin, end):
            table.draft_len = begin
        return able

    # -- rows

    def _plan(self, tables: list[PageTable], lens: Sequence[int], shape: BatchShape) -> StepPlan:
        """Returns the plan of rows after `lens` keys of each request."""
        specs, groups = self.model.kind.specs, self.model.kind.groups
        if self._pages is None or self._pages[0] != tables:
            self._pages = tables, PageTables(specs, len(tables))
        pages = [table.views(groups) for table in tables]
        return build(specs, BatchWork(shape, lens, pages, self._pages[1]))

    def _gather_states(self, states: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        """Returns row rows[i] of each states[i]: a copy, unless consecutive in one tensor."""
        steps = list({id(each): each for each in states}.values())
        first, end = rows[0], rows[0] + len(rows)
        if len(steps) == 1 and list(rows) == list(range(first, end)):
            return steps[0][first:end]
        begins = dict(zip(map(id, steps), accumulate(map(len, steps), initial=0), strict=False))
        every = concat(steps, 0) if len(steps) > 1 else steps[0]
        at = [begins[id(each)] + row for each, row in zip(states, rows, strict=True)]
        index = torch.tensor(at, dtype=torch.int32)
        return self.runner.ops.take_rows(every, to_device(index, every.device))

    def _compact(self, tables: Sequence[PageTable]) -> None:
        """Copies kept states of the target to memory of their own, so that whole steps can go."""
        kept, at = [DraftState.of(table) for table in tables], 0
        hidden = [each for state in kept for each in state.hidden]
        if not hidden:
            return
        rows_of_all = [row for state in kept for row in state.rows]
        every = self._gather_states(hidden, rows_of_all).clone()
        for table, state in zip(tables, kept, strict=True):
            rows = tuple(range(at, at + len(state.rows)))
            table.draft_state = DraftState(state.begin, (every,) * len(rows), rows, state.shares)
            at += len(rows)

    def _extend(
        self,
        ends: Mapping[Request, int],
        width: int = 0,
        how: Settings | None = None,
        guesses: int = 0,
        kind: StepKind | None = None,
    ) -> StepOutput:
        """Computes each request's next rows up to its end. With a `width` all have that many; rows
        after a request's own are rewritten before they are read. With `guesses` the launch also
        samples draft tokens, and the rows of all but the last of them follow."""
        tables, kind = [table_of(each) for each in ends], kind or self.model.extend
        lens = [table.draft_len for table in tables]
        counts = [end - begin for end, begin in zip(ends.values(), lens, strict=True)]
        ids, states, rows = list[int](), list[Tensor](), list[int]()
        for table, (request, end) in zip(tables, ends.items(), strict=True):
            begin, state, tokens = table.draft_len, DraftState.of(table), request.tokens
            positions = [*range(begin, end), *[end - 1] * (width - (end - begin))]
            ids += [tokens[p + self.ahead] for p in positions]
            if self.ahead:
                states += [state.hidden[p - state.begin] for p in positions]
                rows += [state.rows[p - state.begin] for p in positions]
            table.draft_state, table.draft_len = state.drop_before(end - 1), end
        if self.model.states is not None:
            copy_into(self._gather_states(states, rows), self.model.states[: len(rows)])
        shape = shape_of((width,) * len(ends) if width else tuple(counts))
        if width:
            shape = replace(shape, emit=ints(shape.q_indptr[:-1] + counts - 1))
        chain = Chain(self.model.kind, guesses) if guesses else None
        if chain is None or width:
            plan = self._plan(tables, lens, shape)
        else:
            every = shape_of(tuple([count + guesses - 1 for count in counts]))
            whole = self._plan(tables, lens, every)
            self.runner.check(whole, kind)
            last = slice_plan(whole, shape_of((1,) * len(ends)), shape.new_lens - 1)
            plan, chain = slice_plan(whole, shape), chain._replace(plan=last)
        out = self.runner.run(plan, ids, kind, how, chain=chain)
        for table in tables:
            table.clear_moves(kind.groups)
        return out

    def _catch_up(self, ends: Mapping[Request, int]) -> None:
        """Computes all rows up to each request's end, of as many requests at a time as fit."""
        while ends:
            room, some = self.rows, dict[Request, int]()
            for request, end in ends.items():
                begin = table_of(request).draft_len
                if room:
                    some[request] = min(end, begin + room)
                    room -= some[request] - begin
            self._extend(some, kind=self.model.follow)
            ends = {each: end for each, end in ends.items() if table_of(each).draft_len < end}

    def _begin(
        self, asks: Sequence[DraftRequest], how: Settings | None = None, guesses: int = 0
    ) -> StepOutput:
        """Computes rows up to the last token of all that ask; the last rows are one step."""
        ends = {ask.request: self._end(ask.request) for ask in asks}
        most = min(self.steps + 1, self.rows // len(asks))
        late = {r: end - 1 for r, end in ends.items() if end - table_of(r).draft_len > most}
        self._catch_up(late)
        width = self.steps + max(guesses, 1) if self.runner.uniform else 0
        return self._extend(ends, width, how, guesses)

    # -- draft tokens

    def _rows(self, nodes: Sequence[tuple[DraftRequest, Path]]) -> RowBatch:
        """Returns how tokens after these nodes are chosen: as the target would choose them."""
        requests = [ask.request for ask, _ in nodes]
        if self._how is None or self._how[0] != requests:
            prompt_lens = [len(each.spec.prompt) for each in requests]
            how = RowParams.of([ask.params for ask, _ in nodes], prompt_lens)
            self._how = requests, replace(how, logprob_rows=())  # not wanted for draft tokens
        history = {
            row: np.array([*ask.request.tokens, *path], np.int32)
            for row, (ask, path) in enumerate(nodes)
            if ask.params.penalised
        }
        positions = [len(ask.request.tokens) + len(path) for ask, path in nodes]
        return RowBatch(self._how[1], np.array(positions, np.int64), history)

    def _grow_drafts(self, asks: Sequence[DraftRequest]) -> list[DraftTree]:
        """Returns trees for requests whose rows can be computed, one level of all requests at a
        time: of the best tokens after each node of a level, the best are the next level. Chains
        that need nothing but the sampler come from one launch."""
        rows = self._rows([(ask, ()) for ask in asks])
        if self.top_k == 1 and rows.how.plain:
            deep, runner = min([ask.steps for ask in asks]) == self.steps > 1, self.runner
            if runner.uniform and len(runner.sampled):
                return self._late_chains(asks, rows)
            if runner.backend.caps.chains and deep and not runner.uniform:
                return self._chains(asks, rows)
        beams = live = [Beam(ask, self.top_k) for ask in asks]
        out = self._begin(asks)
        while live:
            scores, ids = self._guesses(out, rows)
            first, above, going = 0, list[int](), list[Beam]()
            for beam in live:
                end = first + len(beam.level)
                parents = beam.grow(scores[first:end], ids[first:end])
                if beam.level and len(beam.level[0]) < beam.ask.steps:
                    above += [first + row for row in parents]
                    going.append(beam)
                first = end
            if going:
                self._feed(out, above)
                tokens = [path[-1] for beam in going for path in beam.level]
                rows = self._rows([(beam.ask, path) for beam in going for path in beam.level])
                out = self.runner.run(self._further(going), tokens, self.model.kind)
            live = going
        return [beam.tree() for beam in beams]

    def _chains(self, asks: Sequence[DraftRequest], rows: RowBatch) -> list[DraftTree]:
        """Drafts for all requests by one launch. A chain ends where the model expects it to be
        wrong, or soon after: with few lengths, verify launches are soon recorded."""
        how, trees = sampler.settings(rows, self.vocab_size), list[DraftTree]()
        out = self._begin(asks, how, self.steps)
        found = [(ids.tolist(), np.exp(logs.numpy()).tolist()) for ids, logs in out.guesses]
        for i, ask in enumerate(asks):
            chances, chance = self._chances[ask.params.temperature > 0], 1.0
            ids, shares = list[int](), list[tuple[Chances, float]]()
            for tokens, given in found:
                if tokens[i] == NO_TOKEN or (len(ids) in ENDS and chance < ask.min_chance):
                    break
                ids.append(tokens[i])
                shares.append((chances, given[i]))
                chance *= chances.of(given[i])
            table = table_of(ask.request)
            table.draft_state = DraftState.of(table)._replace(shares=tuple(shares))
            trees.append(DraftTree(tuple(ids), tuple(range(len(ids)))))
        return trees

    def _late_chains(self, asks: Sequence[DraftRequest], rows: RowBatch) -> list[DraftTree]:
        """Drafts for all requests by one launch, without reading a token on the host."""
        least = self.steps + max(ask.steps for ask in asks)
        guesses = min(width for width in self.runner.widths if width >= least) - self.steps
        self.runner.shift.zero_()  # early chains may have left their shifts
        out = self._begin(asks, sampler.settings(rows, self.vocab_size), guesses)
        assert out.sampled is not None, "settings were given"
        self._made = Chains([ask.request for ask in asks], rows.how, guesses, len(out.sampled[0]))
        return [self._made.tree(k, ask.steps) for k, ask in enumerate(asks)]

    def launched(self, requests: Sequence[Request], width: int, hidden: Tensor | None) -> None:
        """Launches next chains of the same length if the launched step verifies the same requests'
        chains. A row has the target's sample after a node and its states there; the first draft
        token follows the last right node. All of it, even which node that is, is on the device."""
        made, self._made, runner, kind = self._made, None, self.runner, self.model.extend
        if made is None or made.requests != list(requests) or width != made.guesses + 1:
            return
        tables, n, guesses = [table_of(each) for each in requests], len(requests), made.guesses
        lens, rows = [table.draft_len for table in tables], self.steps + guesses
        short = any(table.room(g) < table.draft_len + rows for table in tables for g in kind.groups)
        if self.eager or short or any(table.pending for table in tables):
            return
        nodes = (np.arange(n)[:, None] * width + np.minimum(np.arange(rows), guesses)).ravel()
        if self.model.states is not None and hidden is not None:
            states = self._gather_states([hidden] * len(nodes), nodes.tolist())
            self.model.states[: len(nodes)] = states
        known = runner.sampled[: n * width].view(n, width)[:, :guesses]
        guessed = runner.sampled[GUESSES : GUESSES + guesses * made.slots].view(guesses, -1)
        runner.shift[:n] = (known == guessed[:, :n].T).long().cumprod(1).sum(1)
        positions = np.array([len(request.tokens) for request in requests], np.int64)
        how = sampler.settings(RowBatch(made.how, positions, {}), self.vocab_size)
        shape = shape_of((rows,) * n)
        shape = replace(shape, emit=shape.q_indptr[:-1])
        plan, chain = self._plan(tables, lens, shape), Chain(self.model.kind, guesses)
        out = runner.run(plan, ints(-1 - nodes), kind, how, chain=chain)
        assert out.sampled is not None, "settings were given"
        self._made = made._replace(slots=len(out.sampled[0]), number=requests[0].launched_in)

    def _take_early_chains(
        self, early: Chains, asks: Sequence[DraftRequest]
    ) -> list[DraftTree] | None:
        """Returns the early chains if all that ask have one and were in no step since: they follow
        the last tokens, whatever these are."""
        numbers = {request: k for k, request in enumerate(early.requests)}
        requests = [ask.request for ask in asks]
        if any(r not in numbers or r.launched_in != early.number for r in requests):
            return None
        for request in requests:
            table, end = table_of(request), self._end(request)
            table.draft_state, table.draft_len = DraftState.of(table).drop_before(end - 1), end
        if len(asks) == len(early.requests):
            self._made = early._replace(number=0)
        return [early.tree(numbers[ask.request], ask.steps) for ask in asks]

    def _guesses(self, out: StepOutput, rows: RowBatch) -> Best:
        """Returns scores and tokens that follow some rows; in a chain, the one sample."""
        logits = self.model.logits(out.emitted)
        if self.top_k > 1:
            return best(logits, rows, self.top_k, self.eos_ids)
        chosen = sampler.sample(self.runner.ops, logits, rows, self.eos_ids)
        ids = chosen.token_ids.tolist()
        none = {NO_TOKEN: -math.inf}
        return [[none.get(token, 0.0)] for token in ids], [[token] for token in ids]

    def _further(self, beams: Sequence[Beam]) -> StepPlan:
        """Returns the plan of a level's rows. Those of chains are in the pages."""
        tables, counts = [beam.table for beam in beams], tuple([len(beam.level) for beam in beams])
        if self.top_k > 1:
            shape = shape_of(counts, tuple([beam.parents for beam in beams]))
            return self._plan(tables, [table.draft_len for table in tables], shape)
        begins = [beam.table.draft_len + len(beam.level[0]) - 1 for beam in beams]
        return self._plan(tables, begins, shape_of(counts))

    def _feed(self, out: StepOutput, above: Sequence[int]) -> None:
        """Copies the states left by the emitted rows `above` to where the next rows read them."""
        if self.model.hidden is not None and out.next_hidden is not None:
            whole = list(above) == list(range(len(out.next_hidden)))
            self.model.hidden[: len(above)] = out.next_hidden if whole else out.next_hidden[above]


def table_of(request: Request) -> PageTable:
    """Returns the page table of a request that drafts."""
    assert request.table is not None, "a request that drafts has a page table"
    return request.table


@lru_cache(maxsize=256)
def shape_of(counts: tuple[int, ...], trees: tuple[tuple[int, ...], ...] = ()) -> BatchShape:
    """Returns the shape for requests with `counts` rows: the last is emitted, or all of a tree."""
    emits = [tuple(range(n)) if trees else None for n in counts]
    nothing = [0] * len(counts)
    return BatchShape.of(counts, emits, trees or [None] * len(counts), nothing, nothing)


def best(logits: Tensor, batch: RowBatch, k: int, eos_ids: tuple[int, ...]) -> Best:
    """Returns the k best tokens of every row and their log-probabilities among the LIKELY best,
    under the draft and with the row's own noise."""
    scores = sampler.apply_penalties(logits.float(), batch, eos_ids)
    scores, ids = scores.topk(min(max(LIKELY, k), scores.shape[1]))
    floats, ints, _ = sampler.settings(batch, logits.shape[1])
    temperatures, counters = floats[:, :1].float(), ints[:, 1:]
    if temperatures.any():
        heat = to_device(temperatures, scores.device)
        noise = sampler.noise_of(to_device(counters, scores.device), ids)
        scores = torch.where(heat > 0, scores / heat + noise, scores)
    top = torch.log_softmax(scores, -1).topk(min(k, scores.shape[1]))
    return top.values.tolist(), ids.gather(1, top.indices).tolist()
