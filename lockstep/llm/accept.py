"""What a step's samples come to: the tokens of every completion, and what the scheduler is told.

A completion gets one token, or those on which its draft and the target agree and one more; it ends
where a token or its text says so. No completion is changed here but for the text that goes `ahead`
where stop strings are looked for. Knows completions and numbers on the host; the engine calls it.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from lockstep.llm.generation import Ending, TokenUpdates
from lockstep.llm.output import Speculated
from lockstep.llm.rows import Launched
from lockstep.sample.sampler import Logprobs, Sampled
from lockstep.sched.request import Accepted, AcceptedTokens
from lockstep.spec.verify import NodeRows, Verified, verify


def accept(
    launched: Launched, chosen: Sampled, some_ended: bool
) -> tuple[TokenUpdates, AcceptedTokens, list[Ending]]:
    """Looked at one by one are completions that may end, those with a draft, and those that get
    nothing: they could not be sampled or, if some have, ended meanwhile."""
    rows, completions, batch = launched.rows, launched.rows.completions, launched.step.batch
    ids = chosen.token_ids.cpu().numpy()
    verified = Verified({}, {}, chosen.errors() if ids.min() < 0 else {})
    logprobs, begins = chosen.logprobs, {row: i for i, row in enumerate(chosen.logprob_rows)}
    if rows.drafts:
        verified = verify(rows.firsts, drafts_of(launched), ids.tolist(), verified.errors)
        logprobs, begins = gathered(launched, chosen, verified)
        ids = ids[list(rows.firsts)]
    nodes, token_ids, errors = verified
    kept, accepted, endings = dict[int, tuple[int, ...]](), dict[int, Accepted](), list[Ending]()
    texts, speculated = dict[int, tuple[str, ...]](), dict[int, Speculated]()
    ends = np.flatnonzero((ids[:, None] == rows.end_ids).any(1)).tolist()
    looked = completions if some_ended else ()
    ended = [row for row, each in enumerate(looked) if each.finish is not None]
    for row in {*ends, *rows.searched, *ended, *errors, *nodes}:
        completion, entry = completions[row], Accepted((), 0)
        left = completion.most - launched.begins[row]  # a draft may go on behind the last token
        if completion.finish is None:
            tokens = token_ids.get(row, ())
            if row not in nodes and row not in errors:
                tokens = (int(ids[row]),)
            stop_len = completion.accept(tokens).stop_len
            if completion.searched:
                texts[row] = tuple(completion.ahead)
            if row in errors and stop_len is None and len(tokens) < left:
                stop_len = len(tokens)
                endings.append(Ending(completion, "error", errors[row]))
            entry = Accepted(tokens, stop_len, nodes.get(row, ()))
        accepted[row] = entry
        kept[row], _ = entry.cut(left)
    for row, owner in rows.drafts:
        guesses = batch.new_lens[owner] - 1 - batch.requests[owner].pads
        if guesses:
            right = max(min(guesses, len(nodes[row]) - 1, len(kept[row])), 0)
            drafted, before, steps = completions[row].speculated
            speculated[row] = Speculated(drafted + guesses, before + right, steps + 1)
    updates = TokenUpdates(
        completions=completions,
        begins=launched.begins,
        token_ids=ids.tolist(),
        others=kept,
        texts=texts,
        logprobs=logprobs,
        logprob_begins=begins,
        speculated=speculated,
    )
    return updates, AcceptedTokens(ids, accepted), endings


def drafts_of(launched: Launched) -> dict[int, NodeRows]:
    """The drafts that a step verified, by completion."""
    batch, firsts, ids = launched.step.batch, launched.rows.firsts, launched.drafted_ids().tolist()
    drafts = {}
    for row, owner in launched.rows.drafts:
        guesses = ids[batch.begins[owner] : batch.begins[owner + 1]]
        drafts[row] = NodeRows(firsts[row], guesses, batch.rows[owner].parents or ())
    return drafts


def gathered(
    launched: Launched, chosen: Sampled, verified: Verified
) -> tuple[Logprobs | None, dict[int, int]]:
    """The log-probabilities of accepted tokens, and where those of each completion begin."""
    firsts, logprobs = launched.rows.firsts, chosen.logprobs
    if logprobs is None:
        return None, {}
    asked = [row for row, each in enumerate(launched.rows.completions) if each.scored]
    number = {row: i for i, row in enumerate(chosen.logprob_rows)}
    paths = [[firsts[row] + node for node in verified.nodes.get(row, (0,))] for row in asked]
    at = [number[row] for path in paths for row in path]
    index = torch.tensor(at, dtype=torch.int64, device=logprobs.chosen.device)  # of none too
    begins = accumulate(map(len, paths), initial=0)
    return Logprobs(*[column[index] for column in logprobs]), dict(zip(asked, begins, strict=False))
