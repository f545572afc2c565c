"""Log-probabilities of a prompt were missing after a prefix-cache hit.

Summary:
A row whose key is taken from the cache is not computed, so it has no logits. A request for prompt
log-probabilities was matched all the same.
Motivation:
The match sees tokens and pages; the request's other options are handled elsewhere.
Mechanism:
1. A prompt is scored, or generated from, and stays in the cache.
2. It is scored again: its first pages are found, and only the rows after them are computed.
3. The list of scores is shorter than the prompt, or begins with the wrong token.
Key functions:
`kv.prefix.Prefix.match` and its `limit`: a request that wants scores matches no further than it has
been scored. Other engines refuse the combination or switch the cache off.
Symptom:
A cold request has all its scores, a warm one only some.
Risk and impact:
Evaluations that repeat a prompt compare lists of different lengths, or silently average over what
is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

SOURCE = "class: prompt log-probabilities with a prefix cache"
TARGET = "lockstep.kv.prefix:Prefix.match"
CELLS = ("engine-score/llama", "engine-hit/qwen3")
RELATED = ("lockstep-score-chunk", "sglang-16521")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def match(
        self: Any, root: Any, ids: Sequence[int], table: Any, limit: int | None = None
    ) -> Any:
        return old(self, root, ids, table, None)

    return match
