"""The samples of a step and their owners (`SampledRows`, of its batch), the log-probabilities of
given tokens (`compute_scores`), and a step's results until it is settled (`Launched`).

The owners of rows follow from the batch, so they are made once and serve every step in which the
same requests decode: a step adds positions. The engine makes and settles these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.llm.generation import CompletionState, Generation, ScoreUpdate
from lockstep.ops import Ops, to_device
from lockstep.plan.build import paths
from lockstep.run.runner import GUESSES
from lockstep.sample.sampler import Logprobs, RowParams, Sampled, log_probs
from lockstep.sched.request import Batch, Request, ScheduledStep

NO_ID = -2  # neither a token nor a sample of the step before


@dataclass(frozen=True, eq=False)
class Draws:
    """D rows that are sampled from: one per completion, or all nodes of its draft."""

    owners: NDArray[np.int64]  # [D] index of the row's request in the batch
    last_lens: NDArray[np.int64]  # [D] rows up to and including it, after the cached keys
    emits: tuple[int, ...]  # index among the emitted rows
    how: RowParams  # parameters of all rows
    penalised: tuple[tuple[int, tuple[int, ...]], ...]  # penalised rows, the nodes of their paths

    def positions(self, cached_lens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions of the tokens to be chosen: int64 [D]."""
        return cached_lens[self.owners] + self.last_lens


@dataclass(frozen=True, eq=False)
class SampledRows:
    """The owners of a step's samples: S completions, in the order of the requests."""

    generations: tuple[Generation, ...]  # of every request of the batch
    completions: tuple[CompletionState, ...]  # that get tokens
    draws: Draws  # the rows that their tokens are sampled from
    firsts: tuple[int, ...]  # index of each completion's first row in `draws`
    drafts: tuple[tuple[int, int], ...]  # completions with a draft, and the index of its request
    end_ids: NDArray[np.int64]  # [S, E]: tokens that end the text, padded with NO_ID
    searched: tuple[int, ...]  # completions whose text is searched for stop strings
    scored: tuple[tuple[int, int], ...]  # requests with rows to score, their first emitted row

    @classmethod
    def of(cls, batch: Batch, generation_of: Callable[[Request], Generation]) -> SampledRows:
        """Makes them for a batch; `generation_of` finds a request's generation."""
        generations = tuple(map(generation_of, batch.requests))
        completions, draws = list[CompletionState](), list[_Draw]()
        firsts, drafts, scored = list[int](), list[tuple[int, int]](), list[tuple[int, int]]()
        begin = 0
        for i, (rows, generation) in enumerate(zip(batch.rows, generations, strict=True)):
            spec, first = rows.request.spec, begin + len(rows.emit) - rows.draws
            if not spec.embed and (first > begin or (spec.items and rows.samples)):
                scored.append((i, begin))
            own = [generation.completions[rows.request.index]] * rows.sampled
            if rows.sampled > 1:  # at the prompt's end every completion gets a token
                own = generation.completions[: rows.sampled]
            if rows.parents is not None:
                drafts.append((len(completions), i))
                firsts.append(len(draws))
                nodes = enumerate(paths(rows.parents, rows.new_len))
                draws += [(own[0], i, len(path), first + n, tuple(path)) for n, path in nodes]
            else:
                firsts += range(len(draws), len(draws) + len(own))
                draws += [(one, i, rows.new_len, first + k, ()) for k, one in enumerate(own)]
            completions += own
            begin += len(rows.emit)
        longest = max((len(each.end_ids) for each in completions), default=0)
        end_ids = np.full((len(completions), longest), NO_ID, np.int64)
        for row, completion in enumerate(completions):
            end_ids[row, : len(completion.end_ids)] = list(completion.end_ids)
        return cls(
            generations=generations,
            completions=tuple(completions),
            draws=_columns(draws),
            firsts=tuple(firsts),
            drafts=tuple(drafts),
            end_ids=end_ids,
            searched=tuple(r for r, each in enumerate(completions) if each.searched),
            scored=tuple(scored),
        )


# a sampled row: completion, entries of `owners`, `last_lens` and `emits`, nodes of its path
_Draw = tuple[CompletionState, int, int, int, tuple[int, ...]]


def _columns(draws: list[_Draw]) -> Draws:
    completions, owners, last_lens, emits, nodes = zip(*draws, strict=True) if draws else ((),) * 5
    penalised = [row for row, each in enumerate(completions) if each.params.penalised]
    return Draws(
        owners=np.array(owners, np.int64),
        last_lens=np.array(last_lens, np.int64),
        emits=emits,
        how=RowParams.of([c.params for c in completions], [c.prompt_len for c in completions]),
        penalised=tuple((row, nodes[row]) for row in penalised),
    )


@dataclass(frozen=True, eq=False)
class Launched:
    """A launched step, whose results are on the device."""

    step: ScheduledStep
    rows: SampledRows
    begins: tuple[int, ...] = ()  # of every completion, the number of tokens before its new ones
    chosen: Sampled | None = None  # an entry for every sampled row
    scored: tuple[ScoreUpdate, ...] = ()
    embeddings: Tensor | None = None
    hidden: Tensor | NDArray[np.float32] | None = None  # `StepOutput.states` of all rows
    guesses: Tensor | None = None  # draft tokens that the step verifies, if not on the host yet
    ready: torch.Event | None = None  # when all of it is on the host

    def drafted_ids(self) -> NDArray[np.int64] | NDArray[np.int32]:
        """Returns the token of every row, once all of it is on the host."""
        ids = self.step.ids
        if self.guesses is None:
            return ids
        late = ids < -GUESSES
        known = self.guesses.numpy()[np.where(late, -1 - GUESSES - ids, 0)]
        return np.where(late, known, ids)

    def first_ids(self, chosen: Sampled) -> Tensor:
        """Returns each completion's first token, which rows of the next step may wait for. If all
        have drafts, returns every row's: the next rows are the draft's."""
        if len(self.rows.drafts) in (0, len(self.rows.firsts)):
            return chosen.token_ids
        return chosen.token_ids[to_device(torch.tensor(self.rows.firsts), chosen.token_ids.device)]

    def fetch(self) -> Launched:
        """Starts the copies of its results to the host, and waits for none of them."""
        embeddings = None if self.embeddings is None else on_host(self.embeddings)
        scored = [s._replace(logprobs=Logprobs(*map(on_host, s.logprobs))) for s in self.scored]
        chosen = self.chosen
        if chosen is not None:
            logprobs = chosen.logprobs and Logprobs(*map(on_host, chosen.logprobs))
            ids, states = on_host(chosen.token_ids), on_host(chosen.states)
            chosen = replace(chosen, token_ids=ids, states=states, logprobs=logprobs)
        guesses = None if self.guesses is None else on_host(self.guesses)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        out = replace(self, chosen=chosen, scored=tuple(scored), embeddings=embeddings)
        return replace(out, ready=ready, guesses=guesses)


def on_host(tensor: Tensor) -> Tensor:
    """Starts a copy to the host's memory and returns it."""
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def compute_scores(
    ops: Ops, step: ScheduledStep, rows: SampledRows, logits: Tensor
) -> tuple[ScoreUpdate, ...]:
    """Returns log-probabilities of given tokens: a row's logits are those of the next token."""
    updates: list[ScoreUpdate] = []
    for i, begin in rows.scored:
        generation, own = rows.generations[i], step.batch.rows[i]
        first = step.cached_lens.item(i) + own.emit[0] + 1
        end = begin + len(own.emit) - own.samples
        updates += score(ops, generation, own.request, first, logits[begin:end])
        if own.samples and own.request.spec.items:
            updates += first_of_items(ops, generation, logits[end])
    return tuple(updates)


def score(
    ops: Ops, generation: Generation, request: Request, first: int, logits: Tensor
) -> list[ScoreUpdate]:
    """Scores the tokens from number `first` on, of the prompt or given after it."""
    completion, prompt_ids = generation.completions[request.index], generation.prompt_ids
    prompt_len = len(prompt_ids)
    ids = torch.tensor((*prompt_ids, *completion.token_ids)[first : first + len(logits)])
    split = min(max(prompt_len - first, 0), len(logits))
    prompt = (0, split, generation.prompt_scores, first - 1)
    behind = (split, len(logits), completion.scores, first + split - prompt_len)
    tops = (generation.params.top_prompt_logprobs or 0, completion.params.top_logprobs or 0)
    return [
        ScoreUpdate(request, target, at, log_probs(ops, logits[a:b], ids[a:b], k), k)
        for (a, b, target, at), k in zip((prompt, behind), tops, strict=True)
        if a < b
    ]


def first_of_items(ops: Ops, generation: Generation, logits: Tensor) -> list[ScoreUpdate]:
    """Scores the first token of every item by the prompt's last row."""
    items = generation.request.spec.items
    firsts = torch.tensor([item[0] for item in items])
    found = log_probs(ops, logits.expand(len(items), -1), firsts)
    each = zip(generation.completions, *(column.chunk(len(items)) for column in found), strict=True)
    return [ScoreUpdate(generation.request, c.scores, 0, Logprobs(*one), 0) for c, *one in each]
