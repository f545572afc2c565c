"""An aborted request gave back pages that it shared.

Summary:
A request that ends gives back its own hold on its pages. On the way out of an abort the shared ones
were given back twice.
Motivation:
An abort has a path of its own through the scheduler: it must free at once, and whatever is still
held afterwards looks like a leak.
Mechanism:
1. Two requests share the pages of a prefix, with each other or with the tree.
2. One is aborted; its clean-up drops the sharers' holds along with its own.
3. The pages are free while somebody still reads them.
4. The next request writes its own keys there.
Key functions:
`sched.scheduler.Scheduler._end`. A relative of sgl-project/sglang#29352, on the path that is tested
least.
Symptom:
Who stays continues from somebody else's text. When idle, holds and holders do not agree.
Risk and impact:
A leak between users, set off by a client that closes its connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: an abort that frees shared pages"
TARGET = "lockstep.sched.scheduler:Scheduler._end"
CELLS = ("engine-abort/llama", "engine-abort/qwen3")
RELATED = ("sglang-29352", "sglang-27779", "sglang-29860")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _end(self: Any, request: Any, reason: str) -> Any:
        if reason == "abort" and request.table is not None:
            for g, pool in enumerate(self.pools):
                if pool is not None:
                    pool.give(
                        [
                            page
                            for page in dict.fromkeys(request.table.held(g))
                            if pool.refs[page] > 1
                        ]
                    )
        return old(self, request, reason)

    return _end
