"""max_running_requests and disable_radix_cache were accepted and dropped.

Summary:
Two options of the engine did not reach the scheduler, which has defaults for both.
Motivation:
Neither changes an answer, and no test of answers can miss them.
Mechanism:
1. A user limits the requests that run at once, or wants nothing kept.
2. The scheduler gets a config without them.
3. As many run as the default allows, and prefixes are kept.
Key functions:
`sched.scheduler.Scheduler.__init__`, which takes the options.
Symptom:
More requests in a step than asked for; tokens found in a cache that was switched off.
Risk and impact:
Memory that was not meant to be used, and contents of requests kept that were not to be.
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
