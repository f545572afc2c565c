"""The number of tokens was taken for the number of draft keys.

Summary:
A draft head has fewer keys than there are tokens: each key uses the next token as well, and is
computed later. The number of tokens was used where the number of keys was needed.
Motivation:
With a single model, one length says how far a request is.
Mechanism:
1. A prompt ends; the head has not computed its last rows, which depend on tokens still to be
   sampled.
2. Its completions fork. By the number of tokens all pages are whole, so they are shared.
3. Each completion writes the keys of its own first token into the same page.
Key functions:
SGLang's radix cache over windows, where a token length cut keys of two tokens at the wrong offset.
Here `kv.tables.PageTable._len`: for a draft's group `draft_len` is the number of keys.
Symptom:
Upstream: tombstones of freed windows at wrong places. Here: completions overwrite each other's
draft keys.
Risk and impact:
Wrong only where a length ends at a page boundary, so most requests are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#34870"
TARGET = "lockstep.kv.tables:PageTable._len"
CELLS = ("engine-head/llama",)
RELATED = ("sglang-10846", "lockstep-unwritten-draft")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _len(self: Any, g: int, committed_len: int) -> int:
        return committed_len

    return _len
