"""A stop string that came in two tokens was not seen.

Summary:
Stop strings were looked for in the text of each token. One that began in a token and ended in the
next went by.
Motivation:
Most stop strings are a token by themselves, and text that has been sent cannot be taken back.
Mechanism:
1. The text ends with the beginning of a stop string, and is sent.
2. The next token completes the stop string.
3. Neither piece contains it.
Key functions:
`text.Stops.feed`, which holds back what may be the beginning of a stop string.
Symptom:
Generation runs on behind its stop string. Whether it does depends on how the tokenizer happens to
cut the text.
Risk and impact:
Tool calls and turns of a dialogue are not ended; what follows is invented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.text import TextPiece

SOURCE = "class: stop strings across tokens"
TARGET = "lockstep.text:Stops.feed"
CELLS = ("engine-stream/llama", "engine-stream/qwen3")
RELATED = ("lockstep-character-split", "lockstep-stream-again")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def feed(self: Any, text: str) -> Any:
        self.held = ""
        piece = old(self, text)
        self.held = ""
        return piece if piece.stop is not None else TextPiece(text)

    return feed
