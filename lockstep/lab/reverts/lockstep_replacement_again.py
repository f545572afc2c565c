"""The answer repeated a replacement character from the end of the prompt.

Summary:
U+FFFD at the end of a prompt's text was always taken for the start of an incomplete character and
added to the answer, even if the user had written it.
Motivation:
A prompt may end in the middle of a character, whose text then belongs to the answer. Decoded, both
cases look the same.
Mechanism:
1. The prompt ends in invalid bytes that start no character, or in a U+FFFD that the user wrote.
2. All U+FFFD at the end count as not yet sent.
3. The first piece of the answer begins with them.
Key functions:
`text.Detok._settled_len`, which tests whether the bytes can still become a character.
Symptom:
Answers to texts with broken characters begin with a broken character.
Risk and impact:
Text is doubled when prompt and answer are concatenated. An oracle that strips the text in the same
way agrees with the bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.text import REPLACEMENT

SOURCE = "class: windows of incremental detokenisation"
TARGET = "lockstep.text:Detok._settled_len"
CELLS = ("engine-stream/llama", "engine-stream/qwen3")
RELATED = ("lockstep-character-split", "lockstep-lost-space")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _settled_len(self: Any) -> int:
        return len(self._window().rstrip(REPLACEMENT))

    return _settled_len
