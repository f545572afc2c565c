"""Freed window keys were still listed.

Summary:
Window keys that the window has passed are freed while their node stays. The page was freed, but the
entry that points to it was not cleared.
Motivation:
Pages are freed as a whole, but the map from full to window slots was cleared only for the tokens
that were passed in.
Mechanism:
1. The window page of an inner node is evicted and handed to another request.
2. The node's entry still names it.
3. A prompt matches the path, and the window seems to be whole.
4. The request gets a page that holds another request's keys, or none.
Key functions:
The window allocator of SGLang with pages larger than 1. Here `kv.prefix.Prefix._drop_pages`, which
gives pages back and removes them from the node; the revert leaves them in nodes that stay.
Symptom:
A hit gives a different answer from a miss, and one page has two owners: when the engine is idle,
reference counts and holders disagree.
Risk and impact:
A leak between users, under memory pressure, for models with windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#27779"
TARGET = "lockstep.kv.prefix:Prefix._drop_pages"
CELLS = ("engine-evict/qwen3", "engine-evict/gpt-oss")
RELATED = ("sglang-17061", "sglang-29350", "sglang-29352")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _drop_pages(self: Any, node: Any, g: int, count: int) -> None:
        stale = node.pages[g][:count] if node.children else []
        old(self, node, g, count)
        node.pages[g] = stale + node.pages[g]

    return _drop_pages
