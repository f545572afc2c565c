"""Every item of a score had a BOS of its own.

Summary:
Items are continuations of a prompt. They were tokenised like texts that stand for themselves,
special tokens included.
Motivation:
Tokenizers add special tokens unless they are told not to, and one function turns strings into ids.
Mechanism:
1. A prompt and its items are strings.
2. Each item is encoded with special tokens: BOS, then its text.
3. Its log-probabilities are those of a text that begins again in the middle.
Key functions:
`LLM._ids`, which is told whether special tokens are wanted.
Symptom:
Every score is far too low, and one element too long, with tokenizers that have a BOS.
Risk and impact:
Rankings and evaluations are wrong without an error. Tokenizers without BOS hide it, and so do tests
that pass ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: special tokens where a text goes on"
TARGET = "lockstep.llm.api:LLM._ids"
CELLS = ("engine-text/llama", "engine-text/qwen3")
RELATED = ("lockstep-item-tokens",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _ids(self: Any, prompt: Any, special: bool = True) -> Any:
        return old(self, prompt, True)

    return _ids
