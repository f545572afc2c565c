"""The key of a cached prefix left out the identity it belongs to.

Summary:
Keys and values depend on more than token ids: on an image or an encoder's input, on an adapter; and
a tenant may forbid sharing. This identity was missing from the cache key, or collided.
Motivation:
For plain text the tokens are sufficient, and placeholders for images are tokens too.
Mechanism:
1. A request with one identity leaves its prefix in the cache.
2. A request with another identity has the same token ids.
3. It gets the first request's pages.
Key functions:
Block hashes of vLLM (images, adapters and salts: #36708, #30931, #44701). Here
`kv.prefix.Prefix.match`, below one root per tenant and encoder input; the revert has one root for
all.
Symptom:
The answer describes another user's image. For tenants the bits are right, but the hit reveals to
one tenant what another has asked: the lab counts hits exactly.
Risk and impact:
A leak between users, by content or by timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.kv.prefix import Root

SOURCE = "vllm-project/vllm#36708"
TARGET = "lockstep.kv.prefix:Prefix.match"
CELLS = ("engine-hit/llama", "engine-encoder/bart")
RELATED = ("cve-2025-25183", "sglang-29352", "sglang-8622")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def match(
        self: Any, root: Root, ids: Sequence[int], table: Any, limit: int | None = None
    ) -> Any:
        return old(self, Root(draft=root.draft), ids, table, limit)

    return match
