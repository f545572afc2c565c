"""An aborted request gave back pages that it shared.

Summary:
A request that ends drops its own reference to each of its pages. On abort, pages shared with other
requests or the prefix tree were given back twice.
Motivation:
Abort takes its own path through the scheduler. It must free pages immediately, and any page still
held afterwards looks like a leak.
Mechanism:
1. Two requests share the pages of a prefix, or a request shares them with the prefix tree.
2. One request is aborted. Its cleanup drops the other holder's reference along with its own.
3. The pages are free while another request still reads them.
4. The next request takes these pages and writes its own keys there.
Key functions:
`sched.scheduler.Scheduler._end`. Related to sgl-project/sglang#29352, on the path that is tested
least.
Symptom:
The remaining request continues from another request's text. When the engine is idle, reference
counts and holders disagree.
Risk and impact:
One user's content leaks to another, triggered by a client that closes its connection.
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
