"""Freed window keys were still listed.

Summary:
Window keys behind the window are freed while the node that held them stays. The page was freed; the
entry that pointed at it was not
cleared.
Motivation:
Freeing works by pages, the map from full to window slots by tokens; only the tokens that were
passed in were cleared.
Mechanism:
1. The window page of an inner node is evicted and handed to somebody else.
2. The node's entry still names it.
3. A prompt runs along the path; the window seems to be whole.
4. It is given a page that holds another request's keys, or none.
Key functions:
The window allocator of SGLang with pages larger than 1. Here `kv.prefix.Prefix._lose`, which gives
pages back and takes them off the node;
the revert leaves them there where the node stays.
Symptom:
A hit gives another answer than a miss, and two owners believe in one page: when idle, holds and
holders do not agree.
Risk and impact:
A leak between users, under memory pressure, for models with windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#27779"
TARGET = "lockstep.kv.prefix:Prefix._lose"
CELLS = ("engine-evict/qwen3", "engine-evict/gpt-oss")
RELATED = ("sglang-17061", "sglang-29350", "sglang-29352")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _lose(self: Any, node: Any, g: int, count: int) -> None:
        stale = node.pages[g][:count] if node.children else []
        old(self, node, g, count)
        node.pages[g] = stale + node.pages[g]

    return _lose
