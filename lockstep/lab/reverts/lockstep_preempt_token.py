"""A preempted request got its last token twice.

Summary:
A request that loses its pages keeps its tokens. The newest one, which had been sampled and not yet
computed, was appended although it was already in the list.
Motivation:
The number of tokens with keys and the number of known tokens differ by one. Code that rebuilds a
request from both must know which of them includes the newest token.
Mechanism:
1. A step samples a token and passes it to the stream.
2. Before the next step the request is preempted; its token list is rebuilt from its tokens plus the
   newest one.
3. It is admitted again and continues after a token that was never sampled.
Key functions:
`sched.scheduler.Scheduler._preempt`. The opposite error, losing the newest token, changes nothing
here: it is sampled again at its position, with the same noise, and written to the same place.
Symptom:
One word is doubled per preemption, and the text after it differs.
Risk and impact:
Under load only. The text stays plausible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a token lost or doubled by preemption"
TARGET = "lockstep.sched.scheduler:Scheduler._preempt"
CELLS = ("engine-preempt/llama", "engine-preempt/qwen3")
RELATED = ("lockstep-penalty-preempt", "sglang-16507")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _preempt(self: Any, request: Any) -> None:
        if len(request.tokens) > len(request.spec.prompt) + 1:
            request.tokens.append(request.tokens[-1])
        old(self, request)

    return _preempt
