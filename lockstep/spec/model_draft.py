"""Drafts that a model makes: its rows are ordinary plans, through the runner of the target.

The model has groups of its own in the requests' tables, so the scheduler reserves, shares, moves
and frees its pages with the target's. It stands at `PageTable.draft_len`. Rows that are missing
come first, with the target's hidden states where the model reads them; what the last one says is
the first guess. A chain's further rows lie in the pages, above every key that counts; those of a
tree in scratch. Keys of guesses are kept if the tokens were right and the model sees tokens alone;
otherwise they are computed again from what the target says.

A guess is the model's own sample with the target's noise, or the best few: a draft like the target
then errs seldom at any temperature. Where steps are settled late, a chain is launched without a
look at its tokens: they stay on the device until the target has verified them. Knows requests,
plans and one `DraftModel`; `speculation` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.kv.tables import PageTable
from lockstep.models.loader import Info
from lockstep.plan.build import BatchShape, BatchWork, PageTables, build
from lockstep.plan.step import ints
from lockstep.run.kind import StepKind
from lockstep.run.runner import GUESSES, Runner, StepOutput
from lockstep.sample.logits import Row
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import RowBatch, RowParams, Settings, sample, settings
from lockstep.sched.request import DraftTree, Request
from lockstep.spec import beam
from lockstep.spec.draft import NO_DRAFT, DraftModel, DraftRequest, SettledStep

CATCH_UP = 256  # rows that are missing before they are computed without being asked for
State = tuple[Tensor, int]  # the target's states of a step, and a row of it


@dataclass(eq=False)
class DraftState:
    """What is known of a request, as long as it has this table.

    hidden   the target's states at positions from `table.draft_len` on, which the draft has not
             computed yet
    last     the same of the row before
    written  guesses whose keys lie behind `draft_len`, in place
    """

    table: PageTable
    hidden: list[State] = field(default_factory=list)
    last: State | None = None
    written: list[int] = field(default_factory=list)


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
        self._states: WeakKeyDictionary[Request, DraftState] = WeakKeyDictionary()
        self._how: tuple[list[Request], RowParams] | None = None  # of those that asked last
        self._pages: tuple[list[PageTable], PageTables] | None = None  # of the step before

    @property
    def knows_chances(self) -> bool:
        """Chains of a length of their own; where launches are recorded, all are as deep."""
        return self.top_k == 1 and not self.runner.even

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        asks = [ask for ask in requests if self._open(ask.request)]
        if not asks:
            return [NO_DRAFT] * len(requests)
        if self.top_k > 1:
            trees = self._trees(asks)
        elif len(self.runner.sampled) and self._params(asks).plain:
            trees = self._late_chains(asks)
        else:
            trees = self._chains(asks)
        found = {ask.request: tree for ask, tree in zip(asks, trees, strict=True)}
        return [found.get(ask.request, NO_DRAFT) for ask in requests]

    def observe(self, settled: SettledStep) -> None:
        behind: dict[Request, int] = {}
        for request, begin, rows in settled.rows:
            state, end = self._state(request), begin + len(rows)
            table = state.table
            if settled.hidden is not None and begin == table.draft_len + len(state.hidden):
                state.hidden += [(settled.hidden, row) for row in rows]
            if state.written:
                self._keep_written(request, state)
            # a head's last row waits for who asks: it says the first guess
            end, lazy = end - self.ahead, end > len(request.spec.prompt) and not self.eager
            missing = end - table.draft_len
            if missing >= (CATCH_UP if lazy else 1) and self._able(state, end):
                behind[request] = end
        self._catch_up(behind)

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

    def _open(self, request: Request) -> bool:
        """Whether the last row of a request, at least, can be computed now: once more, if it was
        and nobody has seen what it said."""
        state, end = self._state(request), self._end(request)
        if state.table.draft_len == end and not self.ahead:
            state.table.draft_len -= 1
        elif state.table.draft_len == end and state.last is not None and not self.eager:
            state.table.draft_len -= 1
            state.hidden.insert(0, state.last)
        return state.table.draft_len < end and self._able(state, end)

    def _keep_written(self, request: Request, state: DraftState) -> None:
        """Guesses that became tokens have their keys already."""
        table, end = state.table, request.settled_len + 1
        for token in state.written:
            if table.draft_len >= end or request.tokens[table.draft_len] != token:
                break
            table.draft_len += 1
        state.written = []

    # -- rows

    def _run(
        self,
        kind: StepKind,
        tables: list[PageTable],
        lens: Sequence[int] | NDArray[np.int64],
        shape: BatchShape,
        ids: Sequence[int] | NDArray[np.int64],
        how: Settings | None = None,
    ) -> StepOutput:
        """One step of the draft, behind so many keys of each request."""
        if self._pages is None or self._pages[0] != tables:
            self._pages = tables, PageTables(kind.specs, len(tables))
        pages = [table.views(kind.groups) for table in tables]
        work = BatchWork(shape, lens, pages, self._pages[1])
        out = self.runner.run(build(kind.specs, work), np.asarray(ids, np.int32), kind, how)
        for table in tables:
            if table.pending:
                table.moved(kind.groups)
        return out

    def _extend(
        self, parts: Sequence[tuple[Request, int]], width: int = 0, how: Settings | None = None
    ) -> StepOutput:
        """The next rows of some requests, so many of each. With a `width` all have as many: what
        lies behind its own rows is written again before anybody reads it."""
        tables, ids, states = list[PageTable](), list[int](), list[State]()
        lens, counts = list[int](), [count for _, count in parts]
        for request, count in parts:
            state, more = self._state(request), max(0, width - count)
            begin = state.table.draft_len
            own = request.tokens[begin + self.ahead : begin + self.ahead + count]
            ids += own + own[-1:] * more
            if self.ahead:
                taken = state.hidden[:count]
                del state.hidden[:count]
                state.last = taken[-1]
                states += taken + taken[-1:] * more
            tables.append(state.table)
            lens.append(begin)
            state.table.draft_len += count
        self._fill(states)
        if width:
            last = np.arange(len(parts)) * width + counts - 1
            shape = replace(uniform(len(parts), width), emit=ints(last))
        else:
            shape = shape_of(counts, [None] * len(counts))
        return self._run(self.model.extend, tables, lens, shape, ids, how)

    def _fill(self, rows: Sequence[State]) -> None:
        """The target's states of a step's rows, where the model reads them: a copy for every step
        that they come from."""
        buffer, found = self.model.states, dict[int, tuple[Tensor, list[int], list[int]]]()
        for at, (states, row) in enumerate(rows):
            entry = found.setdefault(id(states), (states, [], []))
            entry[1].append(row)
            entry[2].append(at)
        for states, *numbers in found.values():
            index = torch.tensor(numbers)
            if states.device.type == "cuda":  # from pinned memory nothing waits
                index = index.pin_memory().to(states.device, non_blocking=True)
            if buffer is not None:
                buffer.index_copy_(0, index[1], states[index[0]])

    def _catch_up(self, ends: Mapping[Request, int]) -> None:
        """All rows up to where each request's end, of as many requests at a time as fit."""
        missing = {r: end - self._state(r).table.draft_len for r, end in ends.items()}
        while missing:
            room, parts = self.rows, list[tuple[Request, int]]()
            for request, count in missing.items():
                if room:
                    parts.append((request, min(count, room)))
                    room -= parts[-1][1]
            self._extend(parts)
            for request, count in parts:
                missing[request] -= count
            missing = {request: count for request, count in missing.items() if count > 0}

    def _begin(self, asks: Sequence[DraftRequest], how: Settings | None = None) -> StepOutput:
        """The rows up to the last token of all who ask, the last ones in one step."""
        width, requests = self.steps + 1, [ask.request for ask in asks]
        even = width if self.runner.even else 0
        most = width if even or width * len(asks) <= self.rows else 1
        missing = [self._end(r) - self._state(r).table.draft_len for r in requests]
        late = {r: self._end(r) - 1 for r, n in zip(requests, missing, strict=True) if n > most}
        self._catch_up(late)
        missing = [1 if n > most else n for n in missing]
        return self._extend(list(zip(requests, missing, strict=True)), even, how)

    # -- guesses

    def _params(self, asks: Sequence[DraftRequest]) -> RowParams:
        """How the tokens of some requests are chosen: kept while the same ones ask."""
        requests = [ask.request for ask in asks]
        if self._how is None or self._how[0] != requests:
            params = [unscored(ask.params) for ask in asks]
            how = RowParams.of(params, [len(each.spec.prompt) for each in requests])
            self._how = requests, how
        return self._how[1]

    def _late_chains(self, asks: Sequence[DraftRequest]) -> list[DraftTree]:
        """All tokens of all requests without a look at one: guess i of request k, of n, is sample
        GUESSES + i * n + k of the runner, which the target's step reads there."""
        n, how, buffer = len(asks), self._params(asks), self.model.hidden
        tables = [self._state(ask.request).table for ask in asks]
        lens = np.array([len(ask.request.tokens) for ask in asks], np.int64)
        depths = [min(ask.steps, ask.nodes) for ask in asks]
        numbers = -1 - GUESSES - np.arange(max(depths) * n).reshape(-1, n)
        for i, ids in enumerate(numbers):
            chosen = settings(RowBatch(how, lens + i, {}), self.vocab_size)
            if i == 0:
                out = self._begin(asks, chosen)
            else:
                begins = lens - self.ahead + i - 1
                out = self._run(
                    self.model.kind, tables, begins, uniform(n, 1), numbers[i - 1], chosen
                )
            assert out.sampled is not None, "settings were given"
            self.runner.keep(out.sampled[0, :n], -1 - int(ids[0]))
            if buffer is not None and out.behind is not None and i + 1 < len(numbers):
                buffer[:n] = out.behind
        chains = zip(numbers.T.tolist(), depths, strict=True)
        return [DraftTree(tuple(ids[:deep]), tuple(range(deep))) for ids, deep in chains]

    def _chains(self, asks: Sequence[DraftRequest]) -> list[DraftTree]:
        """Token by token, all requests at once, as far as the model thinks that it is right."""
        chains, chances = [list[int]() for _ in asks], [1.0] * len(asks)
        live, out, knows = list(range(len(asks))), self._begin(asks), self.knows_chances
        while live:
            rows = [guess_row(asks[i], chains[i]) for i in live]
            logits = self.model.logits(out.emitted)
            tokens = sample(self.runner.ops, logits, rows, self.eos_ids).token_ids
            alive = list[int]()
            guesses = zip(live, tokens.tolist(), chances_of(logits, tokens), strict=True)
            for at, (i, token, chance) in enumerate(guesses):
                ask, chain = asks[i], chains[i]
                chances[i] *= chance
                if token >= 0:
                    chain.append(token)
                    more = len(chain) < min(ask.steps, ask.nodes)
                    if more and (not knows or chances[i] >= ask.go_on):
                        alive.append(at)
            live = [live[at] for at in alive]
            if live:
                tables = [self._state(asks[i].request).table for i in live]
                begins = [
                    t.draft_len + len(chains[i]) - 1 for t, i in zip(tables, live, strict=True)
                ]
                ids = [chains[i][-1] for i in live]
                self._feed(out, alive)
                out = self._run(self.model.kind, tables, begins, uniform(len(live), 1), ids)
        for ask, chain in zip(asks, chains, strict=True):
            if not self.ahead:
                self._state(ask.request).written = chain[:-1]
        return [DraftTree(tuple(chain), tuple(range(len(chain)))) for chain in chains]

    def _feed(self, out: StepOutput, above: Sequence[int]) -> None:
        """What the next rows read: what these rows, of those that were emitted, left."""
        if self.model.hidden is not None and out.behind is not None:
            self.model.hidden[: len(above)] = out.behind[above]

    def _trees(self, asks: Sequence[DraftRequest]) -> list[DraftTree]:
        """Behind every node of a level the best tokens; of these the best are the next level."""
        beams = [beam.Beam(self.top_k) for _ in asks]
        live, out = list(range(len(asks))), self._begin(asks)
        while live:
            rows = [guess_row(asks[i], path) for i in live for path in beams[i].paths()]
            logits = self.model.logits(out.emitted)
            scores, ids = beam.best(logits, rows, self.top_k, self.eos_ids)
            first, going, above = 0, list[int](), list[int]()
            tokens, trees = list[list[int]](), list[tuple[int, ...] | None]()
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
                shape = shape_of(list(map(len, tokens)), trees)
                flat = [token for level in tokens for token in level]
                self._feed(out, above)
                begins = [table.draft_len for table in tables]
                out = self._run(self.model.kind, tables, begins, shape, flat)
        return [each.tree(ask.nodes) for each, ask in zip(beams, asks, strict=True)]


def shape_of(counts: Sequence[int], trees: Sequence[tuple[int, ...] | None]) -> BatchShape:
    """Of requests with so many rows: the last one is emitted, or all of a tree."""
    emits = [
        None if tree is None else tuple(range(n)) for n, tree in zip(counts, trees, strict=True)
    ]
    nothing = [0] * len(counts)
    return BatchShape.of(counts, emits, trees, nothing, nothing)


@lru_cache(maxsize=256)
def uniform(requests: int, width: int) -> BatchShape:
    """Of so many requests with as many rows each."""
    return shape_of([width] * requests, [None] * requests)


def chances_of(logits: Tensor, tokens: Tensor) -> list[float]:
    """What a draft gives its own guesses, tokens [S], before any temperature or penalty; of what
    could not be guessed nobody asks."""
    shares = logits.softmax(-1).gather(1, tokens.clamp(min=0)[:, None])
    chances: list[float] = shares[:, 0].tolist()
    return chances


@lru_cache(maxsize=1024)
def unscored(params: SamplingParams) -> SamplingParams:
    """The same, without log-probabilities: nobody wants those of guesses."""
    return replace(params, logprobs=None)


def guess_row(ask: DraftRequest, drafted: Sequence[int]) -> Row:
    """How the token behind some guesses is chosen: as the target would choose it."""
    params = ask.params
    tokens, position = ask.request.tokens, len(ask.request.tokens) + len(drafted)
    row = Row(unscored(params), position, len(ask.request.spec.prompt))
    if not params.penalised:
        return row
    return row._replace(token_ids=np.array([*tokens, *drafted], np.int32))
