"""A request's list of pages was another name for somebody else's.

Summary:
The slots of a prefix were handed over as a view of the row that they came from. When the row
changed, the request's prefix did.
Motivation:
A copy costs time in every step, and nothing was expected to write there.
Mechanism:
1. Two continuations share a prefix that ends with a page; the second one's list is the first one's
   list.
2. The first takes a page for its next token; the second sees it as its own.
3. Both write their tokens into it.
Key functions:
`prefix_indices` in SGLang with the prefix cache switched off. Here `PageTable.fork`, whose table
has a list of its own; in the revert it has the parent's, where every page of it is shared.
Symptom:
Both continuations attend to whichever token was written last.
Risk and impact:
Content of one answer in another, only for lengths that are multiples of a page. `plan.check`
refuses a page that two requests write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#34644"
TARGET = "lockstep.kv.tables:PageTable.fork"
CELLS = ("engine-n/llama", "engine-n/deepseek-v3")
RELATED = ("trtllm-12306", "sglang-29352")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def fork(self: Any, committed_len: int) -> Any:
        child = old(self, committed_len)
        if not child.pending:
            child._own, child._views = self._own, self._views
        return child

    return fork
