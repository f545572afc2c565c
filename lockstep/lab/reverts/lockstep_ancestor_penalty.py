"""Penalties did not count the guesses above a row.

Summary:
A node's sample depends on the tokens before it: the committed ones and its ancestors. Penalties
were counted over the committed ones, the last of them in the place of every ancestor.
Motivation:
The tokens of a request are at hand; those of a path have to be collected.
Mechanism:
1. A request with a frequency penalty has a draft of some tokens.
2. The second node's logits are penalised as if the first were not there.
3. Its sample is a token that plain decoding would have penalised away.
Key functions:
`llm.engine.Engine._row_batch`, which joins the tokens of a row's path to those of the request.
Symptom:
A penalised request repeats what it guessed.
Risk and impact:
Unpenalised requests are right, and so is every first token of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: what depends on earlier tokens, in a verify step"
TARGET = "lockstep.llm.engine:Engine._row_batch"
CELLS = ("engine-draft/llama", "engine-tree/llama")
RELATED = ("lockstep-penalty-preempt",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _row_batch(self: Any, step: Any, rows: Any) -> Any:
        batch = old(self, step, rows)
        history = dict(batch.token_ids)
        for row, path in rows.draws.penalised:
            if path:
                ids = history[row] = history[row].copy()
                ids[len(ids) - len(path) :] = ids[len(ids) - len(path)]
        return batch._replace(token_ids=history)

    return _row_batch
