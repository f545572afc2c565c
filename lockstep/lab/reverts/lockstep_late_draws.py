"""A row waited for another one's sample.

Summary:
Settled late, a row names its token by the number of the sample that it waits for. Samples were kept
row by row, where a draft has several.
Motivation:
Without drafts every request samples one row, and both numbers are the same.
Mechanism:
1. A step verifies a draft beside a plain request, behind it in the batch.
2. The next step is launched before the first is settled; the plain request's row waits for sample
   1.
3. Sample 1 is of the draft's second node.
Key functions:
`llm.rows.Launched.first_ids`: the first sample of every completion. Found by the first run of
speculation with late settling.
Symptom:
A request that does not speculate goes on with a token of one that does.
Risk and impact:
Only with both kinds in a batch, and late settling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: two numberings of samples"
TARGET = "lockstep.llm.rows:Launched.first_ids"
CELLS = ("engine-ngram/qwen3",)
RELATED = ("lockstep-late-order", "lockstep-late-sample")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def first_ids(self: Any, chosen: Any) -> Any:
        return chosen.token_ids

    return first_ids
