"""Penalties did not count the draft tokens above a row.

Summary:
A draft node's sample depends on the tokens before it: the committed tokens and the node's
ancestors. Penalties counted the committed tokens only, with the last committed token in the place
of every ancestor.
Motivation:
The tokens of a request are at hand; the tokens of a path have to be collected.
Mechanism:
1. A request with a frequency penalty has a draft of several tokens.
2. The second node's logits are penalised as if the first draft token were not there.
3. The node samples a token that plain decoding would have penalised away.
Key functions:
`llm.engine.Engine._row_batch`, which appends the tokens of a row's path to the tokens of its
request.
Symptom:
A penalised request repeats its own draft tokens.
Risk and impact:
Requests without penalties are right, and so is the first token of every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: state of earlier tokens in a verify step"
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
