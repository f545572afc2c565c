"""What a step's samples come to: the tokens of every completion, and what the scheduler is told.

A completion gets one token, or those on which its draft and the target agree and one more; it ends
where a token or its text says so. No completion is changed here but for the text that goes `ahead`
where stop strings are looked for. Knows completions and numbers on the host; the engine calls it
when a step has come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.llm.generation import CompletionState, Ending, TokenUpdates
from lockstep.llm.output import Speculated
from lockstep.llm.rows import Launched
from lockstep.sample.sampler import Logprobs, Sampled
from lockstep.sched.request import Accepted, AcceptedTokens
from lockstep.spec.verify import NodeRows, Verified, verify


class Samples(NamedTuple):
    """What was chosen, by completion: `first_ids` int64 [S]; of those with a draft all tokens and
    the path; why a token could not be sampled; and, of those that asked, which rows of `logprobs`
    are theirs: as many as they have tokens, from `logprob_begins` on."""

    first_ids: NDArray[np.int64]
    token_ids: Mapping[int, tuple[int, ...]]
    nodes: Mapping[int, tuple[int, ...]]
    errors: Mapping[int, str]
    logprobs: Logprobs | None
    logprob_rows: Sequence[int]
    logprob_begins: Sequence[int]

    def tokens(self, row: int) -> tuple[int, ...]:
        """Of one completion: those that could be sampled."""
        if row in self.token_ids:
            return self.token_ids[row]
        return () if row in self.errors else (int(self.first_ids[row]),)


def accept(
    launched: Launched, chosen: Sampled, some_ended: bool
) -> tuple[TokenUpdates, AcceptedTokens, list[Ending]]:
    """Looked at one by one are completions that may end, those with a draft, and those that get
    nothing: they could not be sampled or, if some have, ended meanwhile."""
    rows, completions = launched.rows, launched.rows.completions
    samples = drafted(launched, chosen) if rows.drafts else plain(chosen)
    nodes, errors = samples.nodes, samples.errors
    kept, accepted, endings = dict[int, tuple[int, ...]](), dict[int, Accepted](), list[Ending]()
    texts, speculated = dict[int, tuple[str, ...]](), dict[int, Speculated]()
    ends = np.flatnonzero((samples.first_ids[:, None] == rows.end_ids).any(1)).tolist()
    ended: list[int] = []
    if some_ended:
        ended = [row for row, each in enumerate(completions) if each.finish is not None]
    for row in {*ends, *rows.searched, *ended, *errors, *nodes}:
        completion, entry = completions[row], Accepted((), 0)
        if completion.finish is None:
            tokens = samples.tokens(row)
            stop_len = completion.accept(tokens).stop_len
            if completion.searched:
                texts[row] = tuple(completion.ahead)
            if row in errors and stop_len is None:
                stop_len = len(tokens)
                endings.append(Ending(completion, "error", errors[row]))
            entry = Accepted(tokens, stop_len, nodes.get(row, ()))
        accepted[row] = entry
        kept[row], _ = entry.cut(completion.most - launched.begins[row])
    batch = launched.step.batch
    for row, owner in rows.drafts:
        guesses = batch.new_lens[owner] - 1 - batch.requests[owner].pads
        if guesses:
            right = min(guesses, len(nodes[row]) - 1, len(kept[row]))
            speculated[row] = counted(completions[row], guesses, max(right, 0))
    updates = TokenUpdates(
        completions=completions,
        begins=launched.begins,
        token_ids=samples.first_ids.tolist(),
        others=kept,
        texts=texts,
        logprobs=samples.logprobs,
        logprob_rows=samples.logprob_rows,
        logprob_begins=samples.logprob_begins,
        speculated=speculated,
    )
    return updates, AcceptedTokens(samples.first_ids, accepted), endings


def plain(chosen: Sampled) -> Samples:
    """A token for every row."""
    ids, asked = chosen.token_ids.cpu().numpy(), chosen.logprob_rows
    return Samples(
        first_ids=ids,
        token_ids={},
        nodes={},
        errors=chosen.errors() if ids.min() < 0 else {},
        logprobs=chosen.logprobs,
        logprob_rows=asked,
        logprob_begins=range(len(asked)),
    )


def drafted(launched: Launched, chosen: Sampled) -> Samples:
    """Where some have a draft: the tokens on its accepted path."""
    step, rows = launched.step, launched.rows
    begins, drafted_ids = step.batch.begins, launched.drafted_ids().tolist()
    ids = chosen.token_ids.cpu().numpy()
    drafts = {
        row: NodeRows(
            rows.firsts[row],
            drafted_ids[begins[owner] : begins[owner + 1]],
            step.batch.rows[owner].parents or (),
        )
        for row, owner in rows.drafts
    }
    verified = verify(rows.firsts, drafts, ids.tolist(), chosen.errors())
    asked = [row for row, each in enumerate(rows.completions) if each.scored]
    logprobs, logprob_begins = gathered(chosen, verified, asked)
    return Samples(
        first_ids=ids[list(rows.firsts)],
        token_ids={row: verified.token_ids[row] for row in verified.nodes},
        nodes=verified.nodes,
        errors=verified.errors,
        logprobs=logprobs,
        logprob_rows=asked,
        logprob_begins=logprob_begins,
    )


def gathered(
    chosen: Sampled, verified: Verified, asked: Sequence[int]
) -> tuple[Logprobs | None, list[int]]:
    """The log-probabilities of accepted tokens, by completion, and where each one's begin: a
    chain's lie behind one another."""
    if chosen.logprobs is None:
        return None, []
    number = {row: i for i, row in enumerate(chosen.logprob_rows)}
    paths = [verified.rows[completion] for completion in asked]
    if all(path[-1] - path[0] < len(path) for path in paths if path):
        return chosen.logprobs, [number[path[0]] if path else 0 for path in paths]
    at = [number[row] for path in paths for row in path]
    index = torch.tensor(at, device=chosen.logprobs.chosen.device)
    begins = list(accumulate(map(len, paths), initial=0))[:-1]
    return Logprobs(*[column[index] for column in chosen.logprobs]), begins


def counted(completion: CompletionState, guesses: int, right: int) -> Speculated:
    """With a draft more of so many guesses, of which some were right."""
    drafted, accepted, steps = completion.speculated
    return Speculated(drafted + guesses, accepted + right, steps + 1)
