"""A character made of several tokens was streamed in pieces.

Summary:
A token stands for bytes. Each token was decoded by itself, so the bytes of one character became one
replacement character each.
Motivation:
Decoding one token is cheap, decoding the whole text again for every token is not, and English does
not show the difference.
Mechanism:
1. A three-byte character is generated as three tokens.
2. The first is decoded alone: its bytes are no valid character.
3. The same happens to the second and the third.
Key functions:
`text.Detok.push`, which decodes a window of tokens and emits only text that can no longer change.
Symptom:
Three replacement characters instead of one character, in every script but the simplest.
Risk and impact:
Streams are unreadable in many languages. The unary answer may be right: stream and unary must be
compared with each other, and both with the text of all tokens.
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
