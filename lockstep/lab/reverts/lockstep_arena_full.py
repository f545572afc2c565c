"""A plan that exactly fills the buffer was refused.

Summary:
The image of a step's plan is written into a buffer of fixed size. An image of exactly that size was
refused as too large.
Motivation:
`>` and `>=` behave alike until a step fills the buffer exactly.
Mechanism:
1. The buffer is sized for the largest step that can be scheduled.
2. That step arrives: every request is in it and every page is in use.
3. It is refused, and so is every retry, because the scheduler schedules the same step again.
Key functions:
`run.step.Arena.host`.
Symptom:
An engine at its limit raises on every step, and the message says that a plan has at most n numbers
and this one has n.
Risk and impact:
It happens only at full load and cannot be reproduced with less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.types import RuleError

SOURCE = "class: a capacity off by one"
TARGET = "lockstep.run.step:Arena.host"
CELLS = ("capacity/llama",)
RELATED = ("lockstep-bucket-full", "sglang-27360")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def host(self: Any, length: int) -> Any:
        if length >= len(self.buffer):
            raise RuleError(
                f"a step's image has at most {len(self.buffer)} numbers",
                str(length),
                "Enlarge the arena",
            )
        return old(self, length)

    return host
