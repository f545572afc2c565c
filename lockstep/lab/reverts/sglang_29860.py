"""The boundary of the cached keys was one key too far.

Summary:
Keys enter the prefix tree up to the committed length. The boundary that was used included the next
token, whose key was not written yet.
Motivation:
A request's number of tokens and its number of keys differ by one, and both are at hand.
Mechanism:
1. A chunk of a prompt ends one token before a page does.
2. The page is entered into the tree as if it were full.
3. The request is aborted or preempted before it writes the last slot.
4. The next request with the same prompt matches the page and attends to that slot.
Key functions:
Insertion of unfinished requests in SGLang's radix cache for window models (the mechanism is
inferred from the fix: the frontier reached the insert boundary). Here `Scheduler._store`, which
passes the length to `kv.prefix.Prefix.insert`.
Symptom:
One key of the prompt is garbage, in an otherwise ordinary request. If the first request continues,
it writes the slot in time.
Risk and impact:
Rare and hard to reproduce: it needs a certain length and chunk size, and a request that leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#29860"
TARGET = "lockstep.sched.scheduler:Scheduler._store"
CELLS = ("engine-abort/llama", "engine-abort/deepseek-v3")
RELATED = ("vllm-41838", "sglang-29350", "hf-37574")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _store(self: Any, request: Any) -> None:
        old(self, request)
        node, table = request.node, request.table
        if node is not None and table is not None and not table.pending:
            length = request.settled_len + 1
            request.node = self.tree.insert(node, request.tokens, table, length)

    return _store
