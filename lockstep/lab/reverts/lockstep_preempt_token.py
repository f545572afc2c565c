"""The last token of a preempted request was taken in twice.

Summary:
A request that loses its pages keeps its tokens. The newest one, which had been sampled and not yet
computed, was put behind them although it was among them.
Motivation:
Tokens that have keys and tokens that are known differ by one; whoever puts a request together again
from both must know which list the newest is in.
Mechanism:
1. A step samples a token and hands it to the stream.
2. Before the next step the request is preempted; its tokens are made anew: those it has, and the
   newest.
3. It comes back and goes on behind a token that nobody sampled.
Key functions:
`sched.scheduler.Scheduler._preempt`. The other direction, a newest token that is lost, changes
nothing here: it is drawn again at its position, with the same noise, and written to the same place.
Symptom:
A word is doubled for every preemption, and what follows is another text.
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
