"""A page was freed while another request still held it.

Summary:
Slots of a cached prefix that a running request had locked were given back, and the next request got
them.
Motivation:
A page with several holders needs a reference count. Repairing one part of a tree node (its window
half) replaced the other half without checking the lock.
Mechanism:
1. A request runs on a cached node and locks it.
2. A second request restores the window part that the node had lost; recovery overwrites the node's
   full slots with its own.
3. The old slots are freed although the first request still reads and extends them.
4. A third request takes and fills them.
Key functions:
Tombstone recovery in SGLang's radix cache for window models. Here `kv.tables.PagePool.give`, which
frees a page when its last holder gives it back; the revert frees it with the first.
Symptom:
A request's answer continues from another user's text. In the lab the partial page of a forked
request is handed out again.
Risk and impact:
A leak between users, under concurrency only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

SOURCE = "sgl-project/sglang#29352"
TARGET = "lockstep.kv.tables:PagePool.give"
CELLS = ("fork/dense",)
RELATED = ("trtllm-12306", "sglang-16507")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def give(self: Any, pages: Iterable[int]) -> Any:
        held = [page for page in dict.fromkeys(pages) if self.refs[page]]
        self.refs[held] = 1
        return old(self, held)

    return give
