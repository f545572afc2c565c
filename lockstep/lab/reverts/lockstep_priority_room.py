"""A request of high priority waited for requests that were already running.

Summary:
Priorities order the queue. Running requests were never displaced, so with no room left a high
priority waited for a low one to end.
Motivation:
Ordering a queue takes one line. Displacing a running request means computing it again, which looks
like waste.
Mechanism:
1. A long request of priority 0 takes the last place.
2. A request of priority 1 arrives and is first in the queue.
3. No running request is preempted: it waits until the other one ends.
Key functions:
`sched.scheduler.Scheduler._preempt_for_priority`.
Symptom:
Priorities have no effect on a full engine, the only place where they matter.
Risk and impact:
Latency, not values: answers keep their bits either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a priority that ends at the queue"
TARGET = "lockstep.sched.scheduler:Scheduler._preempt_for_priority"
CELLS = ("engine-priority/llama", "engine-priority/qwen3")
RELATED = ("lockstep-preempt-token", "lockstep-cached-tokens")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _preempt_for_priority(self: Any) -> None:
        self._blocked = False

    return _preempt_for_priority
