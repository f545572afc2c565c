"""Blocks became matchable with the target's keys, before the draft had its own.

Summary:
A request's blocks were entered into the prefix tree by what the target had computed. The draft
computes its rows later, when it is asked, and some never.
Motivation:
Committed means that the target has it; that a second model lags is nobody's business.
Mechanism:
1. Accepted tokens fill a block; the request is preempted, or ends, before it drafts again.
2. The block is stored with pages of the draft that nobody has written.
3. Whoever matches it drafts from them.
Key functions:
vLLM hashed blocks before the step that computes them (#41838, `vllm-41838`). Here
`sched.scheduler.Scheduler._store`: of a request with a draft the keys that both models have.
Symptom:
Drafts of unwritten keys: NaN in the lab, anything elsewhere. The answers stay right.
Risk and impact:
Acceptance falls under load, when requests are preempted, and behind every second turn of a chat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a second model's keys are taken for granted"
TARGET = "lockstep.sched.scheduler:Scheduler._store"
CELLS = ("engine-head/llama",)
RELATED = ("vllm-41838", "sglang-10846")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _store(self: Any, request: Any) -> None:
        table = request.table
        if table is None:
            return
        before, table.draft_len = table.draft_len, request.settled_len
        try:
            old(self, request)
        finally:
            table.draft_len = before

    return _store
