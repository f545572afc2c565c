"""Every item of a score request got its own BOS.

Summary:
Items are continuations of a prompt. They were tokenized like independent texts, special tokens
included.
Motivation:
Tokenizers add special tokens unless told not to, and one function turns all strings into ids.
Mechanism:
1. A prompt and its items are strings.
2. Each item is encoded with special tokens: BOS, then its text.
3. Its log-probabilities are those of a text that starts over in the middle.
Key functions:
`LLM._ids`, whose argument `special` says whether special tokens are added.
Symptom:
With tokenizers that have a BOS, every score is far too low and one element too long.
Risk and impact:
Rankings and evaluations are wrong without an error. Tokenizers without a BOS hide it, and so do
tests that pass ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: special tokens in the middle of a text"
TARGET = "lockstep.llm.api:LLM._ids"
CELLS = ("engine-text/llama", "engine-text/qwen3")
RELATED = ("lockstep-item-tokens",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _ids(self: Any, prompt: Any, special: bool = True) -> Any:
        return old(self, prompt, True)

    return _ids
