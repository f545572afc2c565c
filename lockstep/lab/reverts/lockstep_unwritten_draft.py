"""Blocks became matchable before the draft model had written its keys.

Summary:
A request's blocks entered the prefix tree as soon as the target model had computed them. The draft
model computes its rows later, when it drafts, and some never.
Motivation:
A committed token has its key in the target model; the second model's delay is easily overlooked.
Mechanism:
1. Accepted tokens fill a block; the request is preempted, or ends, before it drafts again.
2. The block is stored with draft pages that were never written.
3. The next request that matches the block drafts from them.
Key functions:
vLLM hashed blocks before the step that computes them (#41838, `vllm-41838`). Here
`sched.scheduler.Scheduler._store`: for a request with a draft it stores only the keys that both
models have.
Symptom:
Drafts use unwritten keys: NaN in the lab, any value elsewhere. The answers stay right.
Risk and impact:
The acceptance rate falls under load, when requests are preempted, and from the second turn of a
chat on.
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
