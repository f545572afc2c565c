"""A space was lost after a token without text.

Summary:
Text is decoded in a window of the last tokens. The window moved on after every token, also after
one that has no text, and the next
token became the first of a text.
Motivation:
A window that always moves is the simplest rule, and special tokens in the middle of an answer are
rare.
Mechanism:
1. A special token, which has no text, is generated; the window begins at it.
2. The next token is a word with its space.
3. Decoders take the space off that begins a text, and nothing but the special token is before it.
Key functions:
`text.Detok._advance`, which moves the window behind new text only.
Symptom:
Two words run together, after special tokens alone.
Risk and impact:
Text that is not the tokens' text; code whose indentation is off by one. A test without tokens that
have no text cannot see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: windows of incremental detokenisation"
TARGET = "lockstep.text:Detok._advance"
CELLS = ("engine-stream/llama", "engine-stream/qwen3")
RELATED = ("lockstep-character-split", "lockstep-replacement-again")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _advance(self: Any, new: str) -> None:
        self.begin, self.settled = self.settled, len(self.ids)
        self.sent = len(self._window())

    return _advance
