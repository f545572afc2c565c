"""A row took the sample of another row.

Summary:
With late settling, a row names its input token by the index of the pending sample. Samples were
indexed by row, but a request with a draft has several rows.
Motivation:
Without drafts every request samples one row, and both indices are equal.
Mechanism:
1. A step verifies a draft; a plain request follows it in the batch.
2. The next step is launched before the first is settled; the plain request's row waits for sample
   1.
3. Sample 1 belongs to the draft's second node.
Key functions:
`llm.rows.Launched.first_ids`: the first sample of every completion, unless all completions have
drafts. Found by the first run of speculation with late settling.
Symptom:
A request without speculation continues with a token of a request that speculates.
Risk and impact:
It needs both kinds of requests in a batch, and late settling.
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
