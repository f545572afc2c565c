"""A plan that just fitted was refused.

Summary:
The image of a step's plan goes into a buffer of fixed size. One that filled it to the last number
was taken for one too many.
Motivation:
`>` or `>=` is a coin toss unless somebody fills the buffer.
Mechanism:
1. A buffer is sized by the largest step that can be scheduled.
2. That step comes: every request present, every page in use.
3. It is refused, and so is every repetition: the scheduler schedules the same step again.
Key functions:
`run.step.Arena.host`.
Symptom:
An engine at its limit raises for ever, and says that a plan has at most n numbers and this one n.
Risk and impact:
Only at full load, where it cannot be reproduced with less.
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
