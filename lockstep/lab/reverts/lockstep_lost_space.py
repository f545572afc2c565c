"""A space was lost after a token without text.

Summary:
Text is decoded in a window of the last tokens. The window advanced after every token, even after
one without text, so the next token became the first of a text.
Motivation:
A window that always advances is the simplest rule, and special tokens in the middle of an answer
are rare.
Mechanism:
1. A special token, which has no text, is generated; the window begins at it.
2. The next token is a word with its leading space.
3. Decoders strip the leading space of a text, and only the special token precedes the word.
Key functions:
`text.Detok._advance`, which moves the window only past new text.
Symptom:
Two words run together, only after special tokens.
Risk and impact:
The text no longer matches the tokens; code has indentation that is off by one. A test without such
tokens cannot show it.
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
