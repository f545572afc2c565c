"""A request's list of pages aliased another request's list.

Summary:
The slots of a prefix were passed as a view of the row they came from. When the row changed, so did
the request's prefix.
Motivation:
A copy costs time in every step, and no write was expected there.
Mechanism:
1. Two continuations share a prefix that ends at a page boundary; the second one's list is the first
   one's list.
2. The first takes a page for its next token; the second sees it as its own.
3. Both write their tokens into it.
Key functions:
`prefix_indices` in SGLang with the prefix cache switched off. Here `PageTable.fork`, whose result
has its own list of pages; in the revert it uses the parent's list, if all its pages are shared.
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
