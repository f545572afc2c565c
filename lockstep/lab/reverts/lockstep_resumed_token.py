"""A request that was resumed after an error had lost the last token of its answer.

Summary:
A step failed, and every running request was computed again from its prompt and its generated
tokens, except the last one.
Motivation:
The last token of a running request has no key yet. Code that rebuilds a request from its keys does
not see it.
Mechanism:
1. A step raises: no memory, a lost device, an interrupt.
2. Pages and queue are rebuilt, and requests are queued with the tokens whose keys were cached.
3. The token that was sampled last had already been sent to the user. It is sampled again, one
   position early, and sent twice.
Key functions:
`llm.generation.Generation.requests_to_resume`, which makes a job's requests from the tokens
generated so far.
Symptom:
After an error, which another request may have caused, an answer repeats one token and then differs.
Risk and impact:
Nothing is wrong until a step fails; then every running request is, without any report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: state lost when a failed step is computed again"
TARGET = "lockstep.llm.generation:Generation.requests_to_resume"
CELLS = ("engine-error/llama", "engine-error/qwen3")
RELATED = ("lockstep-preempt-token", "lockstep-penalty-preempt")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def requests_to_resume(self: Any) -> Any:
        requests = old(self)
        for request in requests:
            if len(request.tokens) > len(request.spec.prompt) and not request.spec.items:
                request.tokens.pop()
        return requests

    return requests_to_resume
