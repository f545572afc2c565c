"""The rows of a batch that are sampled: for which completions, and how they are chosen and judged.

All of it follows from the batch, so it is made once and serves every step in which the same
requests decode: a step adds positions. Knows requests and completions, no tensor; the engine uses
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.llm.generation import CompletionState, Generation
from lockstep.sample.sampler import RowParams
from lockstep.sched.request import Batch, Request, ScheduledRows

NO_ID = -2  # no token, and no sample of the step before


@dataclass(frozen=True, eq=False)
class SampledRows:
    """S rows, in the order of the requests.

    generations  of every request of the batch
    completions  of every row
    owners       int64 [S]: the number of its request in the batch
    last_lens    int64 [S]: it stands last of so many rows behind the request's cached ones
    emits        which of the emitted rows it is
    how          parameters of all rows
    end_ids      int64 [S, E]: tokens that end its text, NO_ID where there are fewer
    penalised, searched  rows whose earlier tokens are needed; whose text is searched for stops
    scored       requests with rows whose log-probabilities are wanted, and their first emitted row
    """

    batch: Batch
    generations: tuple[Generation, ...]
    completions: tuple[CompletionState, ...]
    owners: NDArray[np.int64]
    last_lens: NDArray[np.int64]
    emits: tuple[int, ...]
    how: RowParams
    end_ids: NDArray[np.int64]
    penalised: tuple[int, ...]
    searched: tuple[int, ...]
    scored: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, batch: Batch, generation_of: Callable[[Request], Generation]) -> SampledRows:
        """Whom the rows of a batch are for."""
        generations = tuple(map(generation_of, batch.requests))
        completions, owners, emits = list[CompletionState](), list[int](), list[int]()
        scored: list[tuple[int, int]] = []
        begin = 0
        for i, (rows, generation) in enumerate(zip(batch.rows, generations, strict=True)):
            spec, first = rows.request.spec, begin + len(rows.emit) - rows.samples
            if not spec.embed and (first > begin or (spec.items and rows.samples)):
                scored.append((i, begin))
            own = sampled_completions(rows, generation)
            completions += own
            owners += [i] * len(own)
            emits += range(first, first + len(own))
            begin += len(rows.emit)
        longest = max((len(each.end_ids) for each in completions), default=0)
        end_ids = np.full((len(completions), longest), NO_ID, np.int64)
        for row, completion in enumerate(completions):
            end_ids[row, : len(completion.end_ids)] = list(completion.end_ids)
        return cls(
            batch=batch,
            generations=generations,
            completions=tuple(completions),
            owners=np.array(owners, np.int64),
            last_lens=np.array([batch.rows[i].last_len for i in owners], np.int64),
            emits=tuple(emits),
            how=RowParams.of(
                [each.params for each in completions], [each.prompt_len for each in completions]
            ),
            end_ids=end_ids,
            penalised=tuple(r for r, each in enumerate(completions) if each.params.penalised),
            searched=tuple(r for r, each in enumerate(completions) if each.searched),
            scored=tuple(scored),
        )

    def positions(self, cached_lens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the tokens that are chosen will stand: int64 [S]."""
        return cached_lens[self.owners] + self.last_lens


def sampled_completions(rows: ScheduledRows, generation: Generation) -> list[CompletionState]:
    """Those that get a token: all at the prompt's end, then the request's own."""
    if rows.sampled > 1:
        return generation.completions[: rows.sampled]
    return [generation.completions[rows.request.index]] * rows.sampled
