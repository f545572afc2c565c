"""Drafts that a model makes: its rows are ordinary plans, through the runner of the target.

The model has groups of its own in the requests' tables and stands at `PageTable.draft_len`. Rows
that are missing come first, with the target's hidden states where the model reads them; what the
last one says is the first guess. A chain's further rows lie in the pages, above every key that
counts, those of a tree in scratch: guesses that were right are computed again. A guess is the
model's own sample with the target's noise, or the best few. Knows requests, plans and one
`DraftModel`; `speculation` calls it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.kv.tables import PageTable
from lockstep.models.loader import Info
from lockstep.ops import sent
from lockstep.plan.build import BatchShape, BatchWork, PageTables, build, single_rows
from lockstep.plan.step import StepPlan, ints
from lockstep.run.kind import StepKind
from lockstep.run.runner import GUESSES, Chain, Runner, StepOutput
from lockstep.sample.formulas import NO_TOKEN
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import RowBatch, RowParams, Settings, sample, settings
from lockstep.sched.request import DraftTree, Request
from lockstep.spec import beam
from lockstep.spec.depth import Chances
from lockstep.spec.draft import LAG, NO_DRAFT, DraftModel, DraftRequest, SettledStep

KEPT, LEAST = 1 << 12, 16  # states that are kept for the requests of a step, and for each at least
SPARSE = 64  # rows of a chunk, of which one is kept: from here on in memory of its own


@dataclass(eq=False)
class DraftState:
    """What is known of a request, as long as it has this table.

    hidden   the target's states at positions from `table.draft_len` on, which the draft has not
             computed yet: for each those of a whole step (no pair with its row: so many objects,
             though they soon go, would have Python look through all it has)
    rows     the row of that step
    last     both of the row before
    shares   what the model gave the guesses of the last chain, and how often such ones are right
    """

    table: PageTable
    hidden: list[Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    last: tuple[Tensor, int] | None = None
    shares: list[tuple[Chances, float]] = field(default_factory=list)

    def take(self, count: int) -> tuple[list[Tensor], list[int]]:
        """The first `count` states, which the draft computes now."""
        hidden, rows = self.hidden[:count], self.rows[:count]
        del self.hidden[:count], self.rows[:count]
        self.last = hidden[-1], rows[-1]
        return hidden, rows


class Chains(NamedTuple):
    """Of each of some requests `guesses`, made by one launch: guess i of request k, of `slots` with
    the pads, is sample GUESSES + i * slots + k of the runner. Those that are early follow what the
    target will have sampled in step `number`, behind so many keys in their tables."""

    requests: list[Request]
    how: RowParams
    guesses: int
    slots: int
    tables: Sequence[PageTable] = ()
    lens: Sequence[int] = ()
    number: int = 0

    def tree(self, k: int, steps: int) -> DraftTree:
        """The first `steps` guesses of request k."""
        first, step = -1 - GUESSES - k, -self.slots
        return DraftTree(tuple(range(first, first + steps * step, step)), tuple(range(steps)))


class ModelDraft:
    """A `Draft`: chains, or trees of the `top_k` best, by a model. A step has at most `rows`;
    `steps` is the deepest guess."""

    def __init__(
        self, model: DraftModel, runner: Runner, top_k: int, steps: int, rows: int, info: Info
    ) -> None:
        self.model, self.runner, self.top_k, self.rows = model, runner, top_k, rows
        self.steps, self.vocab_size, self.eos_ids = steps, info.vocab_size, info.eos_token_ids
        self.ahead = int(bool(model.target_layers))
        # a window's pages go by the target's length: nothing may be missing behind it
        self.eager = any(spec.window is not None for spec in model.kind.specs)
        self.lag = 1 if self.eager else LAG
        self._states: WeakKeyDictionary[Request, DraftState] = WeakKeyDictionary()
        self._how: tuple[list[Request], RowParams] | None = None  # of those that asked last
        self._pages: tuple[list[PageTable], PageTables] | None = None  # of the step before
        self._made: Chains | None = None  # which the next step verifies
        self._early: Chains | None = None  # behind those
        self._chances = Chances(), Chances()  # of guesses without noise, and with

    @property
    def knows_chances(self) -> bool:
        """Chains of a length of their own; where launches are recorded, all are as deep."""
        return self.top_k == 1 and not self.runner.even

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        missing = [self._missing(ask.request) for ask in requests]
        early, self._early, self._made = self._early, None, None
        if early is not None:
            trees = self._taken(early, requests, missing)
            if trees is not None:
                return trees
        asks = [ask for ask, count in zip(requests, missing, strict=True) if count]
        missing = [count for count in missing if count]
        if not asks:
            return [NO_DRAFT] * len(requests)
        late = self.top_k == 1 and self.runner.even and len(self.runner.sampled) > 0
        rows = self._rows(asks) if late else None
        if rows is not None and rows.how.plain:
            trees = self._late_chains(asks, missing, rows)
        elif self.top_k == 1:
            trees = self._chains(asks, missing)
        else:
            trees = self._trees(asks, missing)
        if len(asks) == len(requests):
            return trees
        found = {ask.request: tree for ask, tree in zip(asks, trees, strict=True)}
        return [found.get(ask.request, NO_DRAFT) for ask in requests]

    def observe(self, settled: SettledStep) -> None:
        behind, hidden = dict[Request, int](), settled.hidden
        most, due = max(LEAST, KEPT // max(1, len(settled.rows))), False
        for request, begin, rows in settled.rows:
            state, end = self._state(request), begin + len(rows)
            table = state.table
            if hidden is not None and begin == table.draft_len + len(state.hidden):
                state.hidden += [hidden] * len(rows)
                state.rows += rows
            if state.shares:
                for at, (known, share) in enumerate(state.shares[: len(rows)]):
                    known.add(share, right=at < len(rows) - 1)
                state.shares = []
            # a head's last row waits for who asks: it says the first guess
            end, lazy = end - self.ahead, end > len(request.spec.prompt) and not self.eager
            missing = end - table.draft_len
            if missing >= (most // 2 if lazy else 1) and self._able(state, end):
                behind[request] = end
                due |= not lazy or missing >= most
        if due:  # then of all who will be soon
            self._catch_up(behind)
        long = any(len(each.rows) > SPARSE for each in settled.rows)
        if hidden is not None and (long or len(hidden) > SPARSE * len(settled.rows)):
            compact(hidden, [self._state(each.request) for each in settled.rows])

    def _state(self, request: Request) -> DraftState:
        """What is known of a request; nothing, if its table is another one by now."""
        state, table = self._states.get(request), request.table
        assert table is not None, "who drafts holds pages"
        if state is None or state.table is not table:
            state = self._states[request] = DraftState(table)
        return state

    def _end(self, request: Request) -> int:
        """Where the rows of a request that asks end: all tokens are there."""
        return len(request.tokens) - self.ahead

    def _able(self, state: DraftState, end: int) -> bool:
        """Whether the rows up to `end` can be computed: the target's states are there."""
        return not self.ahead or end - state.table.draft_len <= len(state.hidden)

    def _missing(self, request: Request) -> int:
        """Rows up to the last token's, which is computed once more if it was and nobody has seen
        what it said; 0 if they cannot be computed now."""
        state, end = self._state(request), self._end(request)
        if state.table.draft_len == end and not self.ahead:
            state.table.draft_len -= 1
        elif state.table.draft_len == end and state.last is not None and not self.eager:
            state.table.draft_len -= 1
            state.hidden.insert(0, state.last[0])
            state.rows.insert(0, state.last[1])
        return max(0, end - state.table.draft_len) if self._able(state, end) else 0

    # -- rows

    def _plan(
        self, kind: StepKind, tables: list[PageTable], lens: Sequence[int], shape: BatchShape
    ) -> StepPlan:
        """Of rows behind so many keys of each request."""
        if self._pages is None or self._pages[0] != tables:
            self._pages = tables, PageTables(kind.specs, len(tables))
        pages = [table.views(kind.groups) for table in tables]
        return build(kind.specs, BatchWork(shape, lens, pages, self._pages[1]))

    def _extend(
        self,
        parts: Sequence[tuple[Request, int]],
        width: int = 0,
        how: Settings | None = None,
        guesses: int = 0,
        kind: StepKind | None = None,
    ) -> StepOutput:
        """The next rows of some requests, so many of each. With a `width` all have as many: what
        lies behind its own rows is written again before anybody reads it. Behind these rows come
        those of so many `guesses`, but the last, where they are sampled by the same launch."""
        chain = Chain(self.model.kind, guesses) if guesses else None
        tables, ids, states, rows = list[PageTable](), list[int](), list[Tensor](), list[int]()
        lens, counts, kind = list[int](), [count for _, count in parts], kind or self.model.extend
        for request, count in parts:
            state, more = self._state(request), max(0, width - count)
            begin = state.table.draft_len
            own = request.tokens[begin + self.ahead : begin + self.ahead + count]
            ids += own + own[-1:] * more
            if self.ahead:
                taken, those = state.take(count)
                states += taken + taken[-1:] * more
                rows += those + those[-1:] * more
            tables.append(state.table)
            lens.append(begin)
            state.table.draft_len = begin + count
        if self.model.states is not None:
            fill(self.model.states, states, rows)
        if width:
            last = np.arange(len(parts)) * width + counts - 1
            shape = replace(uniform(len(parts), width), emit=ints(last))
        else:
            shape = shape_of(counts)
        plan = self._plan(kind, tables, lens, shape)
        out = self.runner.run(plan, ids, kind, how, chain=chain)
        for table in tables:
            if table.pending:
                table.moved(kind.groups)
        return out

    def _catch_up(self, ends: Mapping[Request, int]) -> None:
        """All rows up to where each request's end, of as many requests at a time as fit."""
        missing = {r: end - self._state(r).table.draft_len for r, end in ends.items()}
        while missing:
            room, parts = self.rows, list[tuple[Request, int]]()
            for request, count in missing.items():
                if room:
                    parts.append((request, min(count, room)))
                    room -= parts[-1][1]
            self._extend(parts, kind=self.model.follow)
            for request, count in parts:
                missing[request] -= count
            missing = {request: count for request, count in missing.items() if count > 0}

    def _begin(
        self,
        asks: Sequence[DraftRequest],
        missing: Sequence[int],
        how: Settings | None = None,
        guesses: int = 0,
    ) -> StepOutput:
        """The rows up to the last token of all who ask, the last ones in one step."""
        width, requests = self.steps + 1, [ask.request for ask in asks]
        even = self.steps + max(guesses, 1) if self.runner.even else 0
        most = width if even or width * len(asks) <= self.rows else 1
        if max(missing) > most:
            late = {r: self._end(r) - 1 for r, n in zip(requests, missing, strict=True) if n > most}
            self._catch_up(late)
            missing = [1 if n > most else n for n in missing]
        return self._extend(list(zip(requests, missing, strict=True)), even, how, guesses)

    # -- guesses

    def _rows(
        self, asks: Sequence[DraftRequest], guesses: Sequence[Sequence[int]] = ()
    ) -> RowBatch:
        """How the tokens behind some guesses are chosen: as the target would choose them."""
        requests = [ask.request for ask in asks]
        if self._how is None or self._how[0] != requests:
            params = [unscored(ask.params) for ask in asks]
            how = RowParams.of(params, [len(each.spec.prompt) for each in requests])
            self._how = requests, how
        pairs = list(zip(asks, guesses or [()] * len(asks), strict=True))
        history = {
            row: np.array([*ask.request.tokens, *own], np.int32)
            for row, (ask, own) in enumerate(pairs)
            if ask.params.penalised
        }
        positions = [len(ask.request.tokens) + len(own) for ask, own in pairs]
        return RowBatch(self._how[1], np.array(positions, np.int64), history)

    def _late_chains(
        self, asks: Sequence[DraftRequest], missing: Sequence[int], rows: RowBatch
    ) -> list[DraftTree]:
        """All tokens of all requests by one launch, without a look at one."""
        deepest = max(ask.steps for ask in asks)
        recorded = range(deepest, self.steps + 1)
        guesses = next(n for n in recorded if self.steps + n in self.runner.widths)
        self.runner.shift.zero_()  # early chains of the same requests may have left theirs
        out = self._begin(asks, missing, settings(rows, self.vocab_size), guesses)
        assert out.sampled is not None, "settings were given"
        requests, slots = [ask.request for ask in asks], len(out.sampled[0])
        self._made = Chains(requests, rows.how, guesses, slots)
        return [self._made.tree(k, ask.steps) for k, ask in enumerate(asks)]

    def launched(self, requests: Sequence[Request], width: int, hidden: Tensor | None) -> None:
        """The next chains, as long, if those that are verified are of the same requests: a row is
        of what the target samples behind a node and of its states there; the first guess comes from
        the last node that is right. All of this is on the device, and which one that is."""
        made, self._made, runner, kind = self._made, None, self.runner, self.model.extend
        if made is None or made.requests != list(requests) or width != made.guesses + 1:
            return
        tables, n, guesses = [self._state(r).table for r in requests], len(requests), made.guesses
        lens, rows = [table.draft_len for table in tables], self.steps + guesses
        pairs = zip(tables, lens, strict=True)
        if self.eager or not all(ready(t, kind.groups, length + rows) for t, length in pairs):
            return
        nodes = np.arange(n)[:, None] * width + np.minimum(np.arange(rows), guesses)
        if self.model.states is not None and hidden is not None:
            copy_rows(self.model.states, hidden, nodes.ravel())
        known = runner.sampled[: n * width].view(n, width)[:, :guesses]
        guessed = runner.sampled[GUESSES : GUESSES + guesses * made.slots].view(guesses, -1)
        runner.shift[:n] = (known == guessed[:, :n].T).long().cumprod(1).sum(1)
        positions = np.array([len(request.tokens) for request in requests], np.int64)
        how = settings(RowBatch(made.how, positions, {}), self.vocab_size)
        shape = replace(uniform(n, rows), emit=ints(np.arange(n) * rows))
        plan, chain = self._plan(kind, tables, lens, shape), Chain(self.model.kind, guesses)
        out = runner.run(plan, ints((-1 - nodes).ravel()), kind, how, chain=chain)
        assert out.sampled is not None, "settings were given"
        slots, number = len(out.sampled[0]), requests[0].launched_in
        self._early = made._replace(slots=slots, tables=tables, lens=lens, number=number)

    def _taken(
        self, early: Chains, asks: Sequence[DraftRequest], missing: Sequence[int]
    ) -> list[DraftTree] | None:
        """The chains that were made early, if all who ask have one, behind their last tokens."""
        numbers, trees = {request: k for k, request in enumerate(early.requests)}, list[DraftTree]()
        for ask, count in zip(asks, missing, strict=True):
            k, table = numbers.get(ask.request), ask.request.table
            if k is None or table is not early.tables[k] or table.draft_len != early.lens[k]:
                return None
            if ask.request.launched_in != early.number or not 0 < count <= early.guesses + 1:
                return None
            trees.append(early.tree(k, min(ask.steps, early.guesses)))
        for ask, count in zip(asks, missing, strict=True):
            state = self._state(ask.request)
            if self.ahead:
                state.take(count)
            state.table.draft_len += count
        if len(asks) == len(early.requests):
            self._made = early
        return trees

    def _chains(self, asks: Sequence[DraftRequest], missing: Sequence[int]) -> list[DraftTree]:
        """Token by token, all requests at once, as far as the model thinks that it is right."""
        chains, chances = [list[int]() for _ in asks], [1.0] * len(asks)
        states = [self._state(ask.request) for ask in asks]
        for state in states:
            state.shares = []
        live, rows, out = list(range(len(asks))), self._rows(asks), self._begin(asks, missing)
        steps: Iterator[StepPlan] = iter(())
        while True:
            tokens, shares = self._guesses(out, rows)
            alive = list[int]()
            for at, i in enumerate(live):
                if shares:
                    known = self._chances[asks[i].params.temperature > 0]
                    states[i].shares.append((known, shares[at]))
                    chances[i] *= known.of(shares[at])
                if tokens[at] != NO_TOKEN:
                    chains[i].append(tokens[at])
                    if len(chains[i]) < asks[i].steps and chances[i] >= asks[i].go_on:
                        alive.append(at)
            if not alive:
                break
            if len(alive) < len(live):
                live, steps = [live[at] for at in alive], iter(())
            some = [asks[i] for i in live]
            rows = self._rows(some, [chains[i] for i in live])
            self._feed(out, alive)
            plan = next(steps, None)
            if plan is None:
                steps = self._further(some, [len(chains[i]) for i in live])
                plan = next(steps)
            ids = [chains[i][-1] for i in live]
            out = self.runner.run(plan, ids, self.model.kind, checked=True)
        return [DraftTree(tuple(chain), tuple(range(len(chain)))) for chain in chains]

    def _guesses(self, out: StepOutput, rows: RowBatch) -> tuple[list[int], list[float]]:
        """The tokens of some rows and, if it counts, what the model gives them: before any
        temperature or penalty."""
        logits = self.model.logits(out.emitted)
        scores = logits.cpu().numpy()
        if rows.how.plain and not any(each.temperature for each in rows.how.params):
            tokens = scores.argmax(1)
        else:
            tokens = sample(self.runner.ops, logits, rows, self.eos_ids).token_ids.cpu().numpy()
        if not self.knows_chances:
            return tokens.tolist(), []
        weights = np.exp(scores - scores.max(1, keepdims=True))
        shares = weights[np.arange(len(tokens)), tokens] / weights.sum(1)
        return tokens.tolist(), shares.tolist()

    def _further(self, asks: Sequence[DraftRequest], lens: Sequence[int]) -> Iterator[StepPlan]:
        """The next steps of chains of these lengths, planned and checked in one go: as many as all
        may have."""
        width = min([ask.steps - n for ask, n in zip(asks, lens, strict=True)])
        tables = [self._state(ask.request).table for ask in asks]
        begins = [table.draft_len + n - 1 for table, n in zip(tables, lens, strict=True)]
        plan = self._plan(self.model.kind, tables, begins, uniform(len(asks), width))
        self.runner.check(plan, self.model.kind)
        return single_rows(plan, uniform(len(asks), 1))

    def _feed(self, out: StepOutput, above: Sequence[int]) -> None:
        """What the next rows read: what these rows, of those that were emitted, left."""
        if self.model.hidden is not None and out.behind is not None:
            whole = list(above) == list(range(len(out.behind)))
            self.model.hidden[: len(above)] = out.behind if whole else out.behind[above]

    def _trees(self, asks: Sequence[DraftRequest], missing: Sequence[int]) -> list[DraftTree]:
        """Behind every node of a level the best tokens; of these the best are the next level."""
        beams, kind = [beam.Beam(self.top_k) for _ in asks], self.model.kind
        live, out = list(range(len(asks))), self._begin(asks, missing)
        while live:
            paths = [(asks[i], path) for i in live for path in beams[i].paths()]
            rows = self._rows([ask for ask, _ in paths], [path for _, path in paths])
            scores, ids = beam.best(self.model.logits(out.emitted), rows, self.top_k, self.eos_ids)
            first, going, above = 0, list[int](), list[int]()
            tokens, trees = list[list[int]](), list[tuple[int, ...]]()
            for i in live:
                width = beams[i].width
                beams[i].grow(scores[first : first + width], ids[first : first + width])
                if beams[i].depth < asks[i].steps and beams[i].width:
                    level, rows_above, parents = beams[i].level()
                    tokens.append(level)
                    trees.append(parents)
                    above += [first + row for row in rows_above]
                    going.append(i)
                first += width
            if live := going:
                tables = [self._state(asks[i].request).table for i in live]
                flat = [token for level in tokens for token in level]
                self._feed(out, above)
                begins = [table.draft_len for table in tables]
                shape = shape_of(list(map(len, tokens)), trees)
                out = self.runner.run(self._plan(kind, tables, begins, shape), flat, kind)
        return [each.tree(ask.nodes) for each, ask in zip(beams, asks, strict=True)]


def ready(table: PageTable, groups: Sequence[int], kv_len: int) -> bool:
    """Whether a table has room for so many keys, all of them in their places."""
    return not table.pending and all(table.room(g) >= kv_len for g in groups)


def fill(buffer: Tensor, states: Sequence[Tensor], rows: list[int]) -> None:
    """The target's states of a step's rows, where the model reads them."""
    steps = list({id(each): each for each in states}.values())
    every, index = steps[0], rows
    if len(steps) > 1:
        begins = dict(zip(map(id, steps), accumulate(map(len, steps), initial=0), strict=False))
        pairs = zip(states, rows, strict=True)
        every, index = torch.cat(steps), [begins[id(each)] + row for each, row in pairs]
    copy_rows(buffer, every, np.array(index))


def copy_rows(buffer: Tensor, every: Tensor, index: NDArray[np.integer]) -> None:
    """buffer[:] = every[index], as far as that reaches."""
    if buffer.device.type == "cpu":  # by numpy, on this thread
        buffer.numpy()[: len(index)] = every.numpy()[index]
    else:
        at = sent(torch.from_numpy(index), buffer.device)
        torch.index_select(every, 0, at, out=buffer[: len(index)])


def compact(step: Tensor, states: Sequence[DraftState]) -> None:
    """The rows of a step that are still wanted get memory of their own: it need not stay."""
    kept = [(s, i) for s in states for i, each in enumerate(s.hidden) if each is step]
    rows = torch.tensor([s.rows[i] for s, i in kept], dtype=torch.int64)
    fewer = step[sent(rows, step.device)]
    for number, (s, i) in enumerate(kept):
        s.hidden[i], s.rows[i] = fewer, number
    for s in states:
        if s.last is not None and s.last[0] is step:
            s.last = None


def shape_of(counts: Sequence[int], trees: Sequence[tuple[int, ...]] = ()) -> BatchShape:
    """Of requests with so many rows: the last one is emitted, or all of a tree."""
    if not trees and min(counts) == max(counts):
        return uniform(len(counts), counts[0])
    emits = [tuple(range(n)) if trees else None for n in counts]
    nothing = [0] * len(counts)
    return BatchShape.of(counts, emits, trees or [None] * len(counts), nothing, nothing)


@lru_cache(maxsize=256)
def uniform(requests: int, width: int) -> BatchShape:
    """Of so many requests with as many rows each."""
    each, nothing = [None] * requests, [0] * requests
    return BatchShape.of([width] * requests, each, each, nothing, nothing)


@lru_cache(maxsize=1024)
def unscored(params: SamplingParams) -> SamplingParams:
    """The same, without log-probabilities: nobody wants those of guesses."""
    return replace(params, logprobs=None)
