"""max_running_requests and disable_radix_cache were accepted and dropped.

Summary:
Two options of the engine did not reach the scheduler, which has defaults for both.
Motivation:
Neither changes an answer, and no test of answers can miss them.
Mechanism:
1. A user limits the requests that run at once, or wants nothing kept.
2. The scheduler's limits are made without them.
3. As many run as the default allows, and prefixes are kept.
Key functions:
`llm.engine.limits_of`, which makes the scheduler's limits of the options.
Symptom:
More requests in a step than asked for; tokens found in a cache that was switched off.
Risk and impact:
Memory that was not meant to be used, and contents of requests kept that were not to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.sched.scheduler import Limits

SOURCE = "class: options accepted and dropped"
TARGET = "lockstep.llm.engine:limits_of"
CELLS = ("engine-running/llama", "engine-uncached/llama")
RELATED = ("lockstep-cache-dtype",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def limits_of(config: Any) -> Any:
        return Limits(config.chunked_prefill_size)

    return limits_of
