"""Samples of some rows were returned in the places of other rows.

Summary:
Rows with a seed were sampled apart from rows without one, and the results were concatenated in that
order instead of the batch's.
Motivation:
Two kinds of rows need two calls, and restoring the order is easily forgotten.
Mechanism:
1. A batch contains requests with drafts beside plain ones.
2. Each kind is sampled by itself, and the results are concatenated.
3. Verification reads the sample of another row.
Key functions:
vLLM's rejection sampler. Here `spec.verify.verify`: samples are addressed by the row they were
drawn for.
Symptom:
Tokens of other requests; upstream the answer was a row of exclamation marks.
Risk and impact:
Batches of one kind are right; only mixed batches are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: results combined in another order"
TARGET = "lockstep.spec.verify:verify"
CELLS = ("engine-draft/llama",)
RELATED = ("vllm-10863",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def verify(firsts: Any, drafts: Any, sampled: Any, errors: Any) -> Any:
        plain = [first for row, first in enumerate(firsts) if row not in drafts]
        apart = [*plain, *(row for row in range(len(sampled)) if row not in plain)]
        return old(firsts, drafts, [sampled[row] for row in apart], errors)

    return verify
