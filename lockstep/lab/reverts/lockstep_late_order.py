"""A request that had to wait for its token values was scheduled without them.

Summary:
A step may be scheduled before the previous step is settled. Requests that need the values of their
tokens, or that fork, have to wait; they did not.
Motivation:
Most requests can continue: a row takes its token from the device, and the host never reads it.
Mechanism:
1. A launched step ends a prompt of a request with n completions, or with penalties on.
2. The next step is scheduled before that one is settled, with a row of the same request.
3. Its completions are forked from keys that have already been extended, and its penalties count a
   token that has no value yet.
Key functions:
`sched.request.is_held`, which says whether a request is held back.
Symptom:
Answers with penalties, and the second of n completions, differ from those of an engine that settles
every step immediately.
Risk and impact:
It does not show on a device where host work and launches alternate. With overlap every such answer
differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.types import INT32_MAX

SOURCE = "class: a step that is scheduled before the one before it is settled"
TARGET = "lockstep.sched.request:is_held"
CELLS = ("engine-late/llama", "engine-late/qwen3")
RELATED = ("lockstep-late-sample", "lockstep-penalty-preempt")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def waits(held_until: Any, settled: int) -> Any:
        return old(held_until, INT32_MAX)

    return waits
