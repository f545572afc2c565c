"""A request that exactly fits into the cache was refused.

Summary:
The last token of an answer is sampled and never computed, so it needs no slot. It was counted.
Motivation:
"Prompt plus new tokens" is the natural length of the answer, and one page more or less does not
show in a large cache.
Mechanism:
1. A request has 21 + 4 tokens, of which 24 are ever written: six pages of 4.
2. Pages are counted for 25 tokens: seven.
3. A cache of six pages refuses a request that it could serve, and the error message is wrong.
Key functions:
`sched.scheduler.Scheduler._peak`, which is called before a request is accepted.
Symptom:
The longest requests are refused; all other requests are served.
Risk and impact:
A cache sized for a context length serves all of it but the last token. A test with spare pages
cannot show it.
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
