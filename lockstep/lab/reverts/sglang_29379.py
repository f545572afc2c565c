"""A page table was narrower than what speculation writes.

Summary:
Tables had room for the tokens of a request; a verify step writes up to its width past them.
Motivation:
The length of a request is known; how far its draft tokens reach is decided elsewhere.
Mechanism:
1. A request is close to the end of its pages.
2. A verify step writes its draft tokens after the last token.
3. The slots of the last ones are looked up past the end of the table's row: in the next row.
Key functions:
SGLang's req_to_token and page_table near the end of the context. Here
`sched.scheduler.Scheduler.make_room` reserves the whole width, or the step's rows shrink to one
plain row; with the bug it reserves one key.
Symptom:
Keys of another request are overwritten, or the access faults.
Risk and impact:
Only near a limit, only with speculation: rare, and then another request's answer is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#29379"
TARGET = "lockstep.sched.scheduler:Scheduler.make_room"
CELLS = ("engine-draft/llama", "engine-guessed-end/llama")
RELATED = ("sglang-15469",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def make_room(self: Any, request: Any, keys: int, nodes: int) -> Any:
        return old(self, request, 0, 0)

    return make_room
