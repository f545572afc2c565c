"""After an error inside a step the engine went on with what the step had left behind.

Summary:
An exception in the middle of a step leaves pages reserved, keys half written and a step that was
never committed. The mark that says so
was taken off, and nothing was made anew.
Motivation:
Errors inside a model are rare and usually the end of the process; what comes after them is hardly
ever tried.
Mechanism:
1. A layer raises: memory is short, a kernel refuses, somebody presses stop.
2. The caller gets its exception and asks for the next step.
3. The scheduler still waits for the old one: nobody's request ever moves again.
Key functions:
`llm.engine.Engine._recover`, which makes pages, tree, queue and text anew from the jobs.
Symptom:
One error in one step, and every request of the engine hangs or fails for ever.
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
