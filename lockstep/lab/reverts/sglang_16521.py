"""Generated tokens were not part of the prefix-cache key.

Summary:
When a request ended, its keys were cached under the tokens of its prompt; its generated tokens were
missing from the tree's key.
Motivation:
There are two lists of tokens, one filled in for the prompt and one that grows, and they are equal
until the first token is generated.
Mechanism:
1. A request generates an answer; the answer's keys are in its pages.
2. Only the prompt's tokens are entered into the tree.
3. The next turn of the conversation begins with prompt and answer, and matches the prompt alone.
Key functions:
`fill_ids` and token ids in SGLang's radix cache. Here `sched.scheduler.Scheduler._store`, which
inserts by the tokens that have keys.
Symptom:
Upstream, key and value had different lengths. Here the second turn finds fewer tokens than it
should: the bits are right, the hit counter is not.
Risk and impact:
Every turn of a chat computes the previous answer again. Only a counter shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#16521"
TARGET = "lockstep.sched.scheduler:Scheduler._store"
CELLS = ("engine-hit/llama", "engine-hit/gpt-oss")
RELATED = ("vllm-36708", "cve-2025-25183")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _store(self: Any, request: Any) -> None:
        if request.settled_len <= len(request.spec.prompt):
            old(self, request)

    return _store
