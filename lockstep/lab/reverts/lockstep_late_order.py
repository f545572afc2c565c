"""Who had to wait for the values of its tokens was scheduled without them.

Summary:
A step may be scheduled before the one before it is settled. Requests that need the values of their
tokens, or that fork, have to wait; they did not.

Motivation:
Most requests can go on: a row takes its token from the device, and nobody on the host reads it.

Mechanism:
1. A prompt ends in a step that is launched, with n samples, or with penalties on.
2. The next step is scheduled before that one is settled, with a row of the same request.
3. Its completions are forked from keys that go on already, and its penalties count a token that has
   no value yet.

Key functions:
`sched.request.waits`, which says who is held.

Symptom:
Answers with penalties, or the second of n completions, that differ from those of an engine that
settles at once.

Risk and impact:
Nothing shows on a device where host and launches take turns; with overlap every such answer is
another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.types import INT32_MAX

SOURCE = "class: a step that is scheduled before the one before it is settled"
TARGET = "lockstep.sched.request:waits"
CELLS = ("engine-late/llama", "engine-late/qwen3")
RELATED = ("lockstep-late-sample", "lockstep-penalty-preempt")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def waits(held_until: Any, settled: int) -> Any:
        return old(held_until, INT32_MAX)

    return waits
