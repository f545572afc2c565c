"""A character that takes several tokens was sent in pieces.

Summary:
Tokens are bytes. Each was decoded by itself, and the bytes of one character became one replacement
sign each.
Motivation:
Decoding one token is fast, decoding everything again for every token is not, and English does not
show the difference.
Mechanism:
1. A character of three bytes is generated as three tokens.
2. The first is decoded alone: bytes that are no character.
3. So are the second and the third.
Key functions:
`text.Detok.push`, which decodes a window of tokens and sends what can no longer change.
Symptom:
Three replacement signs instead of one character, in every script but the simplest.
Risk and impact:
Streams are unreadable in many languages. The answer in one piece may be right: stream and unary
must be compared, and both with the text
of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: incremental detokenisation token by token"
TARGET = "lockstep.text:Detok.push"
CELLS = ("engine-stream/llama", "engine-stream/qwen3")
RELATED = ("lockstep-stop-split", "lockstep-stream-again")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def push(self: Any, token_id: int) -> Any:
        self.ids.append(token_id)
        self.begin = self.settled = len(self.ids)
        self.sent = 0
        return self.tokenizer.decode([token_id])

    return push
