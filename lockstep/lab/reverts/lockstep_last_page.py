"""A request that just fitted into the cache was refused.

Summary:
The last token of an answer is sampled and never computed, so it needs no room. It was counted.
Motivation:
"Prompt and new tokens" is the length of the answer; one page more or less is lost in a large cache.
Mechanism:
1. A request has 21 + 4 tokens, of which 24 are ever written: six pages of 4.
2. Pages are counted for 25: seven.
3. A cache of six pages refuses a request that it could serve, with an error that says so wrongly.
Key functions:
`sched.scheduler.Scheduler._peak`, which is asked before a request is taken in.
Symptom:
The longest requests are refused; everything else is served.
Risk and impact:
A cache sized for a context serves all of it but the last token, and no test with room to spare can
see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a capacity off by one"
TARGET = "lockstep.sched.scheduler:Scheduler._peak"
CELLS = ("capacity/llama", "capacity/qwen3")
RELATED = ("lockstep-arena-full", "lockstep-bucket-full")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _peak(self: Any, spec: Any, g: int, keys: int, step_len: int) -> Any:
        return old(self, spec, g, keys + 1, step_len)

    return _peak
