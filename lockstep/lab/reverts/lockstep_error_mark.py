"""After an error inside a step the engine continued with the state the step had left.

Summary:
An exception in the middle of a step leaves pages reserved, keys half written and a step that was
never settled. The flag that records this was cleared, and nothing was rebuilt.
Motivation:
Errors inside a model are rare and usually end the process; continuing after one is hardly ever
tested.
Mechanism:
1. A layer raises: out of memory, a refused kernel, a user's interrupt.
2. The caller gets the exception and asks for the next step.
3. The scheduler still waits for the failed step, so no request ever advances again.
Key functions:
`llm.engine.Engine._recover`, which rebuilds pages, tree, queue and text from the jobs.
Symptom:
After one error in one step, every request of the engine hangs or fails permanently.
Risk and impact:
A server loses all its users to one bad step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: an engine that does not survive an error of one step"
TARGET = "lockstep.llm.engine:Engine._recover"
CELLS = ("engine-error/llama", "engine-error/bart")
RELATED = ("lockstep-preempt-token", "lockstep-abort-shared")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _recover(self: Any) -> None:
        self._changing = False

    return _recover
