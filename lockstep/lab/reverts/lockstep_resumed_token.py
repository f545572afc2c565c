"""What went on after an error had lost the last token of its answer.

Summary:
A step failed, and everything that was running was computed again: from the prompt and the tokens
that were there, but for the last one.

Motivation:
A running request's last token has no key yet. Who rebuilds a request from its keys does not see it.

Mechanism:
1. A step raises: no memory, a device that is gone, an interrupt.
2. Pages and queue are made anew, and requests are queued with the tokens whose keys were cached.
3. The token that was sampled last was told to the user already. It is sampled again, one position
   early, and told twice.

Key functions:
`llm.generation.Generation.resumed`, which makes the requests of a job from what has come out.

Symptom:
An answer that repeats one token after an error that somebody else's request may have caused, and
goes on differently from there.

Risk and impact:
Nothing is wrong until something fails; then every running request is, and says so nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: state lost when a failed step is computed again"
TARGET = "lockstep.llm.generation:Generation.resumed"
CELLS = ("engine-error/llama", "engine-error/qwen3")
RELATED = ("lockstep-preempt-token", "lockstep-penalty-preempt")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def resumed(self: Any) -> Any:
        requests = old(self)
        for request in requests:
            if len(request.tokens) > len(request.spec.prompt) and not request.spec.items:
                request.tokens.pop()
        return requests

    return resumed
