"""max_running_requests and disable_radix_cache were accepted and dropped.

Summary:
Two engine options did not reach the scheduler, which has defaults for both.
Motivation:
Neither option changes an answer, so no test of answers can notice that they are missing.
Mechanism:
1. A user limits the number of requests that run together, or turns the prefix cache off.
2. The scheduler gets a config without these options.
3. The default number of requests runs, and prefixes are kept.
Key functions:
`sched.scheduler.Scheduler.__init__`, which takes the options.
Symptom:
More requests in a step than allowed; cache hits although the cache was switched off.
Risk and impact:
Memory is used that was meant to stay free, and contents of requests are kept that were meant to be
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.config import EngineConfig

SOURCE = "class: options accepted and dropped"
TARGET = "lockstep.sched.scheduler:Scheduler.__init__"
CELLS = ("engine-running/llama", "engine-uncached/llama")
RELATED = ("lockstep-cache-dtype",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(
        self: Any, kinds: Any, pools: Any, config: EngineConfig, arrivals: int = 0
    ) -> None:
        rows = config.chunked_prefill_size
        old(self, kinds, pools, EngineConfig(chunked_prefill_size=rows), arrivals)

    return __init__
