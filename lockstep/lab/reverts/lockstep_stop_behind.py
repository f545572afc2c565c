"""Tokens behind a stop were kept.

Summary:
A verify step brings several tokens at once. A stop among them ended the request, with all of them.
Motivation:
In plain decoding the token that stops is the last one there is.
Mechanism:
1. Four guesses are accepted; the second is a stop token.
2. The request ends, and keeps the third and the fourth.
3. The answer goes on behind its end.
Key functions:
`sched.request.Accepted.cut`: of a list only what stands before the stop, and itself, counts.
Symptom:
Answers are longer with speculation than without.
Risk and impact:
Text is often cut elsewhere, so that only token ids and counts show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: an end in the middle of accepted tokens"
TARGET = "lockstep.sched.request:Accepted.cut"
CELLS = ("engine-guessed-end/llama",)
RELATED = ("lockstep-late-stop",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def cut(self: Any, most: int) -> Any:
        kept, reason = old(self, most)
        return (self.token_ids[:most] if reason == "stop" and kept else kept), reason

    return cut
