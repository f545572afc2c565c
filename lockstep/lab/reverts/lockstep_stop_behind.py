"""Tokens after a stop token were kept.

Summary:
A verify step yields several tokens. A stop among them ended the request but kept all of them.
Motivation:
In plain decoding the stop token is always the last token.
Mechanism:
1. Four draft tokens are accepted; the second is a stop token.
2. The request ends and keeps the third and the fourth.
3. The answer continues past its end.
Key functions:
`sched.request.Accepted.cut`, which keeps the tokens up to and including the stop.
Symptom:
Answers are longer with speculation than without.
Risk and impact:
The text is often cut elsewhere, so that only token ids and counts show it.
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
