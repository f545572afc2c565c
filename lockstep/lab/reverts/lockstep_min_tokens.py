"""min_tokens worked only next to a request with penalties.

Summary:
Logits are edited only in steps where some row needs it. Rows with min_tokens were not counted among
them.
Motivation:
Most steps edit nothing and should not copy their logits; bias and penalties are the obvious reasons
to edit.
Mechanism:
1. A request has min_tokens and nothing else; its best token is EOS.
2. Alone, the step finds no bias and no penalty and leaves the logits as they are: EOS is chosen.
3. Next to a penalised neighbour the step edits all its rows, and EOS is forbidden as it should be.
Key functions:
`sample.sampler.edited_rows`, which says whether a row's logits are edited.
Symptom:
Answers end too early, depending on the other requests in the step.
Risk and impact:
An answer depends on its neighbours. Tests that mix parameters in every batch do not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: fast paths that forget a parameter"
TARGET = "lockstep.sample.sampler:edited_rows"
CELLS = ("seeds/llama", "engine-end/llama")
RELATED = ("lockstep-late-stop",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def changes(batch: Any) -> Any:
        return list(range(len(batch.positions))) if batch.how.edits.any() else []

    return changes
