"""A stop string that spans two tokens was missed.

Summary:
Stop strings were searched in the text of each token. A stop string that began in one token and
ended in the next was missed.
Motivation:
Most stop strings are a single token, and text that has been sent cannot be taken back.
Mechanism:
1. The text ends with the beginning of a stop string, and is sent.
2. The next token completes the stop string.
3. Neither piece contains it.
Key functions:
`text.Stops.feed`, which holds back text that may be the start of a stop string.
Symptom:
Generation continues past its stop string. Whether it does depends on how the tokenizer splits the
text.
Risk and impact:
Tool calls and dialogue turns do not end; the text after them is invented.
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
