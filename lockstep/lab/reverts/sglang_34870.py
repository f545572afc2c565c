"""The number of tokens was taken for the number of draft keys.

Summary:
A head has fewer keys than there are tokens: each is of one token more, and they are computed later.
The length of the tokens was used where that of the keys was meant.
Motivation:
One length says how far a request is, as long as there is one model.
Mechanism:
1. A prompt ends; the head has not computed its last rows, which are of tokens still to be sampled.
2. Its completions fork. By the tokens' length all pages are whole, and are shared.
3. Each completion writes the keys of its own first token into the same page.
Key functions:
SGLang's radix cache over windows, where a token length cut keys of two tokens at the wrong offset.
Here `kv.tables.PageTable._len`: of a draft's group `draft_len` says how many keys there are.
Symptom:
Upstream: marks of freed windows at wrong places. Here: completions spoil each other's draft keys.
Risk and impact:
Wrong only where a length ends with a page: most requests are spared.
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
