"""A leaf without its window stayed in the tree.

Summary:
A leaf of the prefix tree whose window keys are gone cannot end a match. It was not removed.
Motivation:
Only its window part was evicted; the full part is still there and looks useful.
Mechanism:
1. The window pages of an inner node are evicted; the node stays, because its children need its full
   pages.
2. The children are evicted too.
3. The node is not visited again: a leaf without a window, whose full pages are kept for a match
   that cannot happen.
Key functions:
Eviction in SGLang's radix cache for window models (three issues of one kind; known from their
titles and fixes). Here `kv.prefix.Prefix._prune`.
Symptom:
Cached pages that no request can use, and a tree that breaks its own invariant. `check` finds it
when the engine is idle.
Risk and impact:
The cache shrinks with time. Upstream, code that relied on "leaves are whole" then freed or labelled
the wrong keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#29350"
TARGET = "lockstep.kv.prefix:Prefix._prune"
CELLS = ("engine-evict/qwen3",)
RELATED = ("sglang-17061", "sglang-29860", "sglang-29352")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _prune(self: Any, node: Any) -> None:
        return None

    return _prune
