"""A preempted request reported its own keys as a cache hit.

Summary:
`cached_tokens` reports how much of a prompt was found in the prefix cache when the request was
admitted. After a preemption the request finds the blocks that it computed itself, and these were
counted.
Motivation:
Readmission after preemption looks like any other admission: same match, same lengths.
Mechanism:
1. A prompt that is not in the cache is computed; its whole blocks enter the tree.
2. The request is preempted and admitted again; the match finds these blocks.
3. The hit length of the first admission, 0, is replaced by the new one.
Key functions:
`sched.scheduler.Scheduler._admit`, which keeps the hit length of the first admission.
Symptom:
`cached_tokens` is above 0 for a prompt seen for the first time, under load only.
Risk and impact:
Billing and hit rates are based on this number. It came to depend on the neighbours in the batch,
which nothing in an answer may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a hit counted after preemption"
TARGET = "lockstep.sched.scheduler:Scheduler._admit"
CELLS = ("engine-preempt/llama", "engine-preempt/qwen3")
RELATED = ("lockstep-preempt-token", "lockstep-penalty-preempt")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _admit(self: Any, request: Any) -> bool:
        admitted = bool(old(self, request))
        if admitted:
            request.hit_len = request.cached_len
        return admitted

    return _admit
