"""The rows of a batch that are sampled: for which completions, and how they are chosen and judged.

All of it follows from the batch, so it is made once and serves every step in which the same
requests decode: a step adds positions. Knows requests and completions, no tensor; the engine uses
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.llm.generation import CompletionState, Generation
from lockstep.plan.tree import paths
from lockstep.sample.sampler import RowParams
from lockstep.sched.request import Batch, Request, ScheduledRows

NO_ID = -2  # no token, and no sample of the step before


@dataclass(frozen=True, eq=False)
class Draws:
    """D rows that are sampled from: one for every completion that gets tokens, or all nodes of its
    draft.

    owners     int64 [D]: the number of its request in the batch
    last_lens  int64 [D]: it stands last of so many rows behind the request's cached ones
    emits      which of the emitted rows it is
    how        parameters of all rows
    penalised  rows whose earlier tokens are needed, each with the nodes of its path: () without
               a draft
    """

    owners: NDArray[np.int64]
    last_lens: NDArray[np.int64]
    emits: tuple[int, ...]
    how: RowParams
    penalised: tuple[tuple[int, tuple[int, ...]], ...]

    def positions(self, cached_lens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the tokens that are chosen will stand: int64 [D]."""
        return cached_lens[self.owners] + self.last_lens


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Whom a step's samples are for: S completions, in the order of the requests.

    generations  of every request of the batch
    completions  that get tokens
    draws        the rows that they are sampled from
    firsts       the first of every completion's: number `i` of `draws`, if there are no drafts
    drafts       completions with a draft, and the number of its request in the batch
    end_ids      int64 [S, E]: tokens that end its text, NO_ID where there are fewer
    searched     completions whose text is searched for stops
    scored       requests with rows whose log-probabilities are wanted, and their first emitted row
    """

    batch: Batch
    generations: tuple[Generation, ...]
    completions: tuple[CompletionState, ...]
    draws: Draws
    firsts: tuple[int, ...]
    drafts: tuple[tuple[int, int], ...]
    end_ids: NDArray[np.int64]
    searched: tuple[int, ...]
    scored: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, batch: Batch, generation_of: Callable[[Request], Generation]) -> SampledRows:
        """Whom the rows of a batch are for."""
        generations = tuple(map(generation_of, batch.requests))
        completions, draws = list[CompletionState](), list[_Draw]()
        firsts, drafts, scored = list[int](), list[tuple[int, int]](), list[tuple[int, int]]()
        begin = 0
        for i, (rows, generation) in enumerate(zip(batch.rows, generations, strict=True)):
            spec, first = rows.request.spec, begin + len(rows.emit) - rows.draws
            if not spec.embed and (first > begin or (spec.items and rows.samples)):
                scored.append((i, begin))
            own = sampled_completions(rows, generation)
            if rows.parents is not None:
                drafts.append((len(completions), i))
                firsts.append(len(draws))
                nodes = enumerate(paths(rows.parents, rows.new_len))
                draws += [_Draw(own[0], i, len(path), first + n, path) for n, path in nodes]
            else:
                firsts += range(len(draws), len(draws) + len(own))
                draws += [_Draw(one, i, rows.new_len, first + k) for k, one in enumerate(own)]
            completions += own
            begin += len(rows.emit)
        longest = max((len(each.end_ids) for each in completions), default=0)
        end_ids = np.full((len(completions), longest), NO_ID, np.int64)
        for row, completion in enumerate(completions):
            end_ids[row, : len(completion.end_ids)] = list(completion.end_ids)
        return cls(
            batch=batch,
            generations=generations,
            completions=tuple(completions),
            draws=_columns(draws),
            firsts=tuple(firsts),
            drafts=tuple(drafts),
            end_ids=end_ids,
            searched=tuple(r for r, each in enumerate(completions) if each.searched),
            scored=tuple(scored),
        )


class _Draw(NamedTuple):
    """One row that is sampled from."""

    completion: CompletionState
    owner: int
    last_len: int
    emit: int
    path: Sequence[int] = ()


def _columns(draws: Sequence[_Draw]) -> Draws:
    completions = [draw.completion for draw in draws]
    return Draws(
        owners=np.array([draw.owner for draw in draws], np.int64),
        last_lens=np.array([draw.last_len for draw in draws], np.int64),
        emits=tuple([draw.emit for draw in draws]),
        how=RowParams.of(
            [each.params for each in completions], [each.prompt_len for each in completions]
        ),
        penalised=tuple(
            (row, tuple(draw.path))
            for row, draw in enumerate(draws)
            if draw.completion.params.penalised
        ),
    )


def sampled_completions(rows: ScheduledRows, generation: Generation) -> list[CompletionState]:
    """Those that get a token: all at the prompt's end, then the request's own."""
    if rows.sampled > 1:
        return generation.completions[: rows.sampled]
    return [generation.completions[rows.request.index]] * rows.sampled
