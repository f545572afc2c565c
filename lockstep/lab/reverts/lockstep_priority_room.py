"""A request of high priority waited behind those that were running.

Summary:
Priorities order the queue. Whoever runs already was left alone, so with no room a high priority
waited for a low one to end.
Motivation:
The order of a queue is one line; taking somebody's place means computing again, which looks like
waste.
Mechanism:
1. A long request of priority 0 holds the last place.
2. One of priority 1 arrives. It stands first in the queue.
3. Nobody makes way: it waits for as long as the other one takes.
Key functions:
`sched.scheduler.Scheduler._displace`.
Symptom:
Priorities that do nothing on a full engine, the only place where they matter.
Risk and impact:
Latency, not values; answers keep their bits either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a priority that ends at the queue"
TARGET = "lockstep.sched.scheduler:Scheduler._displace"
CELLS = ("engine-priority/llama", "engine-priority/qwen3")
RELATED = ("lockstep-preempt-token", "lockstep-cached-tokens")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _displace(self: Any) -> None:
        self._blocked = False

    return _displace
