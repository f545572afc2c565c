"""The last token of a preempted request was drawn twice.

Summary:
A request that loses its pages keeps its tokens. The newest one, which had been sampled and not yet
computed, was dropped with the keys.
Motivation:
Tokens and keys are lists of almost the same length; cutting both to the committed length looks
tidy.
Mechanism:
1. A step samples a token and hands it to the stream.
2. Before the next step the request is preempted, and its tokens are cut to those that have keys.
3. It comes back, samples the same position again, with the same noise, and hands the token out a
   second time.
Key functions:
`sched.scheduler.Scheduler._preempt`.
Symptom:
A word is doubled, or an answer is one token short, for every preemption.
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
        if len(request.output) > 1:
            request.tokens.pop()
        old(self, request)

    return _preempt
