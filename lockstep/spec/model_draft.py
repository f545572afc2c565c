"""Drafts that a model makes: its rows are ordinary plans, through the runner of the target.

The model has groups of its own in the requests' tables, so the scheduler reserves, shares, moves
and frees its pages with the target's. It stands at `PageTable.draft_len`. Rows that are missing
come first, ragged, with the target's hidden states where the model reads them; what their last one
says is the root of the draft. A chain's further rows lie in the pages, above every key that counts;
those of a tree in scratch. Keys of guesses are kept if the tokens were right and the model sees
tokens alone; otherwise they are computed again from what the target says.

A guess is the model's own sample with the target's noise, or the best few: a draft like the target
then errs seldom at any temperature. Knows requests, plans and one `DraftModel`; `speculation`
calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from lockstep.kv.tables import PageTable
from lockstep.plan.build import RequestWork, build
from lockstep.run.runner import Runner, StepOutput
from lockstep.sample.logits import Row
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import sample
from lockstep.sched.request import DraftTree, Request
from lockstep.spec import beam
from lockstep.spec.draft import NO_DRAFT, DraftModel, DraftRequest, SettledStep

CATCH_UP = 256  # rows that are missing before they are computed without being asked for


class Tip(NamedTuple):
    """What the last row of a request said: [1, d'] for the logits, [1, d] for the next row."""

    emitted: Tensor
    hidden: Tensor | None

    def copied(self) -> Tip:
        """Out of the memory that the next replay writes to."""
        return Tip(self.emitted.clone(), None if self.hidden is None else self.hidden.clone())


@dataclass(eq=False)
class DraftState:
    """What is known of a request, as long as it has this table.

    hidden   the target's states at positions from `table.draft_len` on, in pieces; of rows that
             the draft has not computed yet
    written  guesses whose keys lie behind `draft_len`, in place
    tip      of the row before `draft_len`; None if it is not known
    """

    table: PageTable
    hidden: list[tuple[Tensor, ...]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    tip: Tip | None = None

    @property
    def hidden_len(self) -> int:
        return sum(len(piece[0]) for piece in self.hidden)

    def take(self, count: int) -> list[tuple[Tensor, ...]]:
        """The first states, so many of them, which are used now."""
        taken: list[tuple[Tensor, ...]] = []
        while count:
            piece = self.hidden.pop(0)
            if len(piece[0]) > count:
                self.hidden.insert(0, tuple([each[count:] for each in piece]))
                piece = tuple([each[:count] for each in piece])
            taken.append(piece)
            count -= len(piece[0])
        return taken


class NodeWork(NamedTuple):
    """Rows of one request in a step of the draft: `ids` from position `cached_len` on, or, as
    `parents` say, nodes of a tree behind it."""

    request: Request
    ids: Sequence[int]
    cached_len: int
    emit: tuple[int, ...]
    parents: tuple[int, ...] | None = None


class ModelDraft:
    """A `Draft`: chains, or trees of the `top_k` best, by a model. A step has at most `rows`."""

    def __init__(
        self,
        model: DraftModel,
        runner: Runner,
        top_k: int,
        rows: int,
        eos_ids: tuple[int, ...] = (),
    ) -> None:
        self.model, self.runner, self.top_k, self.rows = model, runner, top_k, rows
        self.eos_ids = eos_ids
        self.ahead = int(bool(model.target_layers))
        self.knows_chances = top_k == 1
        # a window's pages go by the target's length: nothing may be missing behind it
        self.eager = any(spec.window is not None for spec in model.kind.specs)
        self._states: WeakKeyDictionary[Request, DraftState] = WeakKeyDictionary()

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        for ask in requests:
            self._reopen(self._state(ask.request), ask.request)
        able = [ask for ask in requests if self._able(ask.request, self._asked(ask.request))]
        self._extend({ask.request: self._asked(ask.request) for ask in able})
        able = [ask for ask in able if self._state(ask.request).tip is not None]
        trees = self._chains(able) if self.top_k == 1 else self._trees(able)
        found = {ask.request: tree for ask, tree in zip(able, trees, strict=True)}
        return [found.get(ask.request, NO_DRAFT) for ask in requests]

    def observe(self, settled: SettledStep) -> None:
        behind: dict[Request, int] = {}
        for request, begin, rows in settled.rows:
            state = self._state(request)
            if settled.hidden and begin == state.table.draft_len + state.hidden_len:
                index = torch.tensor(rows, device=settled.hidden[0].device)
                state.hidden.append(tuple([layer[index] for layer in settled.hidden]))
            self._keep_written(request, state)
            end, lazy = request.settled_len, request.missing_len == 1 and not self.eager
            missing = end - state.table.draft_len
            if missing >= (CATCH_UP if lazy else 1) and self._able(request, end):
                behind[request] = end
        self._extend(behind)

    def _state(self, request: Request) -> DraftState:
        """What is known of a request; nothing, if its table is another one by now."""
        state, table = self._states.get(request), request.table
        assert table is not None, "who drafts holds pages"
        if state is None or state.table is not table:
            state = self._states[request] = DraftState(table)
        return state

    def _asked(self, request: Request) -> int:
        """Where the rows of a request that asks end: all tokens are there."""
        return len(request.tokens) - self.ahead

    def _able(self, request: Request, end: int) -> bool:
        """Whether the rows up to `end` can be computed: the target's states are there."""
        state = self._state(request)
        return not self.ahead or end - state.table.draft_len <= state.hidden_len

    def _reopen(self, state: DraftState, request: Request) -> None:
        """The last row is computed again, if nobody kept what it said."""
        if state.tip is None and not self.ahead and state.table.draft_len == len(request.tokens):
            state.table.draft_len -= 1

    def _keep_written(self, request: Request, state: DraftState) -> None:
        """Guesses that became tokens have their keys already."""
        table, end = state.table, request.settled_len + 1
        for token in state.written:
            if table.draft_len >= end or request.tokens[table.draft_len] != token:
                break
            table.draft_len += 1
            state.tip = None
        state.written = []

    # -- rows

    def _run(self, works: Sequence[NodeWork], hidden: Tensor | None) -> StepOutput:
        """One step of the draft. `hidden`: the states of all its rows, where it reads some."""
        kind, buffer = self.model.kind, self.model.hidden
        if buffer is not None and hidden is not None:
            buffer[: len(hidden)] = hidden
        plans, ids = list[RequestWork](), list[int]()
        for work in works:
            table = work.request.table
            assert table is not None, "who drafts holds pages"
            plans.append(
                RequestWork(
                    cached_len=work.cached_len,
                    new_len=len(work.ids),
                    pages=table.views(kind.groups),
                    emit=work.emit,
                    parents=work.parents,
                )
            )
            ids += work.ids
        out = self.runner.run(build(kind.specs, plans), np.array(ids, np.int32), kind)
        for work in works:
            table = work.request.table
            assert table is not None, "it held them a moment ago"
            table.moved(kind.groups)
        return out

    def _extend(self, ends: Mapping[Request, int]) -> None:
        """All rows up to where each request's end, of as many requests at a time as fit."""
        states = {request: self._state(request) for request in ends}
        while todo := [r for r, end in ends.items() if states[r].table.draft_len < end]:
            self._extend_some(todo, ends)

    def _extend_some(self, todo: Sequence[Request], ends: Mapping[Request, int]) -> None:
        room, works, states = self.rows, list[NodeWork](), list[tuple[Tensor, ...]]()
        for request in todo:
            state = self._state(request)
            begin = state.table.draft_len
            count = min(ends[request] - begin, room)
            if not count:
                break
            room -= count
            ids = request.tokens[begin + self.ahead : begin + self.ahead + count]
            works.append(NodeWork(request, ids, begin, (count - 1,)))
            if self.ahead:
                states += state.take(count)
        fused = None
        if self.ahead:
            layers = zip(*states, strict=True)
            fused = self.model.fuse(tuple([torch.cat(layer) for layer in layers]))
        out, last = self._run(works, fused), -1
        for i, work in enumerate(works):
            state = self._state(work.request)
            last += len(work.ids)
            tip = Tip(out.emitted[i : i + 1], None)
            if self.ahead:
                tip = tip._replace(hidden=out.layers[0][last : last + 1])
            state.tip = tip.copied() if self.runner.graphs else tip
            state.table.draft_len += len(work.ids)

    # -- guesses

    def _chains(self, asks: Sequence[DraftRequest]) -> list[DraftTree]:
        """Token by token, all requests at once, as far as the model thinks that it is right."""
        chains, chances = [list[int]() for _ in asks], [1.0] * len(asks)
        live = list(range(len(asks)))
        tips = self._tips(asks)
        while live and tips is not None:
            rows = [guess_row(asks[i], chains[i]) for i in live]
            logits = self.model.logits(tips.emitted)
            tokens = sample(self.runner.ops, logits, rows, self.eos_ids).token_ids
            alive, works = list[int](), list[NodeWork]()
            guesses = zip(live, tokens.tolist(), chances_of(logits, tokens), strict=True)
            for at, (i, token, chance) in enumerate(guesses):
                ask, begin = asks[i], self._state(asks[i].request).table.draft_len
                chances[i] *= chance
                if token >= 0:
                    chains[i].append(token)
                    more = len(chains[i]) < min(ask.steps, ask.nodes)
                    if more and chances[i] >= ask.go_on:
                        cached_len = begin + len(chains[i]) - 1
                        works.append(NodeWork(ask.request, (token,), cached_len, (0,)))
                        alive.append(at)
            if not works:
                break
            states = None if tips.hidden is None else tips.hidden[alive]
            out = self._run(works, states)
            live = [live[at] for at in alive]
            tips = Tip(out.emitted, out.layers[0] if self.ahead else None)
        for ask, chain in zip(asks, chains, strict=True):
            if not self.ahead:
                self._state(ask.request).written = chain[:-1]
        return [DraftTree(tuple(chain), tuple(range(len(chain)))) for chain in chains]

    def _tips(self, asks: Sequence[DraftRequest]) -> Tip | None:
        """What the last rows of all said."""
        tips = [tip for ask in asks if (tip := self._state(ask.request).tip) is not None]
        if not tips:
            return None
        hidden = [tip.hidden for tip in tips if tip.hidden is not None]
        return Tip(torch.cat([tip.emitted for tip in tips]), torch.cat(hidden) if hidden else None)

    def _trees(self, asks: Sequence[DraftRequest]) -> list[DraftTree]:
        """Behind every node of a level the best tokens; of these the best are the next level."""
        beams = [beam.Beam(self.top_k) for _ in asks]
        live, tips = list(range(len(asks))), self._tips(asks)
        while live and tips is not None:
            rows = [guess_row(asks[i], path) for i in live for path in beams[i].paths()]
            scores, ids = beam.best(self.model.logits(tips.emitted), rows, self.top_k, self.eos_ids)
            first, works, above = 0, list[NodeWork](), list[int]()
            going = list[int]()
            for i in live:
                width = beams[i].width
                beams[i].grow(scores[first : first + width], ids[first : first + width])
                if beams[i].depth < asks[i].steps and beams[i].width:
                    table = self._state(asks[i].request).table
                    level, rows_above, parents = beams[i].level()
                    emit = tuple(range(len(level)))
                    works.append(NodeWork(asks[i].request, level, table.draft_len, emit, parents))
                    above += [first + row for row in rows_above]
                    going.append(i)
                first += width
            if not works:
                break
            states = None if tips.hidden is None else tips.hidden[above]
            out = self._run(works, states)
            live, tips = going, Tip(out.emitted, out.layers[0] if self.ahead else None)
        return [each.tree(ask.nodes) for each, ask in zip(beams, asks, strict=True)]


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
