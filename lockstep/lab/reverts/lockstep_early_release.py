"""A window let go of pages by what was guessed.

Summary:
Behind a window, pages are given back by the committed length. They were given back by the length
that a draft would reach.
Motivation:
The step computes rows up to there, and its last row sees nothing before its own window.
Mechanism:
1. A draft of some tokens is scheduled; pages behind the deepest one's window are given back.
2. The guesses are rejected, or the first rows of the draft look further back than the last.
3. Keys that are visible are gone, or are another request's by now.
Key functions:
`sched.scheduler.Scheduler.make_room`; `PageTable.release` takes the settled length.
Symptom:
Wrong bits in layers with a window, with speculation, close to a page's end.
Risk and impact:
A guard sees it when the plan is built, if it looks at what every row sees.
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
