"""Window pages were released by the draft's length instead of the committed length.

Summary:
Pages before the window are released according to the committed length. They were released according
to the length that a draft would reach.
Motivation:
The step computes rows up to that length, and its last row sees nothing before its own window.
Mechanism:
1. A draft of some tokens is scheduled. Pages before the window of its deepest row are released.
2. The draft tokens are rejected, or the first rows of the draft look further back than the last
   one.
3. Keys that are still visible are gone, or have been overwritten by another request.
Key functions:
`sched.scheduler.Scheduler.make_room`; `PageTable.release` takes the settled length.
Symptom:
Wrong bits in window layers, with speculation, close to the end of a page.
Risk and impact:
A guard can see it when the plan is built, if it checks what every row sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: window release before acceptance"
TARGET = "lockstep.sched.scheduler:Scheduler.make_room"
CELLS = ("engine-draft/qwen3", "engine-tree/qwen3")
RELATED = ("sglang-29379",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def make_room(self: Any, request: Any, keys: int, nodes: int) -> Any:
        if request.table is not None:
            request.table.release(request.settled_len + keys)
        return old(self, request, keys, nodes)

    return make_room
