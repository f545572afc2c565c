"""Turns a step's samples into the tokens of each completion and what the scheduler is passed.

A completion gets one token, or the draft tokens that the target agrees with and one more; it ends
where a token or its text ends it. No completion is changed here except for its `ahead` text where
stop strings are searched. Knows completions and host numbers; the engine calls it.
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
    """Returns the tokens to write, those for the scheduler, and the endings. Only completions that
    may end, have a draft, or get nothing (not sampled, or ended) are handled one by one."""
    rows, completions, batch = launched.rows, launched.rows.completions, launched.step.batch
    ids = chosen.token_ids.cpu().numpy()
    verified = Verified({}, {}, chosen.errors() if ids.min() < 0 else {})
    logprobs, begins = chosen.logprobs, {row: i for i, row in enumerate(chosen.logprob_rows)}
    if rows.drafts:
        verified = verify(rows.firsts, drafts_of(launched), ids.tolist(), verified.errors)
        logprobs, begins = gather_logprobs(launched, chosen, verified)
        ids = ids[list(rows.firsts)]
    nodes, token_ids, errors = verified
    kept, accepted, endings = dict[int, tuple[int, ...]](), dict[int, Accepted](), list[Ending]()
    texts, speculated = dict[int, tuple[str, ...]](), dict[int, Speculated]()
    ends = np.flatnonzero((ids[:, None] == rows.end_ids).any(1)).tolist()
    looked = completions if some_ended else ()
    ended = [row for row, each in enumerate(looked) if each.finish is not None]
    for row in {*ends, *rows.searched, *ended, *errors, *nodes}:
        completion, entry = completions[row], Accepted((), 0)
        left = completion.most - launched.begins[row]  # a draft may extend past the last token
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
    """Returns the drafts that a step verified, by completion."""
    batch, firsts, ids = launched.step.batch, launched.rows.firsts, launched.drafted_ids().tolist()
    drafts = {}
    for row, owner in launched.rows.drafts:
        guesses = ids[batch.begins[owner] : batch.begins[owner + 1]]
        drafts[row] = NodeRows(firsts[row], guesses, batch.rows[owner].parents or ())
    return drafts


def gather_logprobs(
    launched: Launched, chosen: Sampled, verified: Verified
) -> tuple[Logprobs | None, dict[int, int]]:
    """Returns the accepted tokens' log-probabilities and each completion's first row in them."""
    firsts, logprobs = launched.rows.firsts, chosen.logprobs
    if logprobs is None:
        return None, {}
    asked = [row for row, each in enumerate(launched.rows.completions) if each.scored]
    number = {row: i for i, row in enumerate(chosen.logprob_rows)}
    paths = [[firsts[row] + node for node in verified.nodes.get(row, (0,))] for row in asked]
    at = [number[row] for path in paths for row in path]
    index = torch.tensor(at, dtype=torch.int64, device=logprobs.chosen.device)  # may be empty
    begins = accumulate(map(len, paths), initial=0)
    return Logprobs(*[column[index] for column in logprobs]), dict(zip(asked, begins, strict=False))
