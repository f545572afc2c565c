"""Blocks were found by a hash that others could make collide.

Summary:
A cached block was looked up by the hash of its tokens; equal hashes counted as equal tokens.
Motivation:
Comparing a number is cheap, and a collision looks unlikely as long as nobody looks for one.
Mechanism:
1. A prompt fills a block; the cache remembers the block's hash.
2. Another prompt has other tokens with the same hash: by chance, or made so on purpose, since the
   hash function was predictable.
3. It is given the first prompt's keys.
Key functions:
Prefix caching in vLLM with Python's built-in hash (CVE-2025-25183). Here `kv.prefix.Node`, whose
children are found by the tokens
themselves. The revert's hash is the sum of the tokens, so that two orders of the same tokens
collide.
Symptom:
An answer to another prompt than the one that was sent.
Risk and impact:
Somebody can choose what other users' requests see. A cache key must be compared, not only hashed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "CVE-2025-25183, https://nvd.nist.gov/vuln/detail/CVE-2025-25183"
TARGET = "lockstep.kv.prefix:Node.__init__"
CELLS = ("engine-hit/llama", "engine-hit/deepseek-v3")
RELATED = ("vllm-36708", "llamacpp-27994")


class Hashed(dict[Any, Any]):
    """A dictionary that compares hashes."""

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(sum(key))

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(sum(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(sum(key), value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(sum(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(sum(key), default)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, parent: Any, key: Any, end: int, groups: int) -> None:
        old(self, parent, key, end, groups)
        if parent is not None:  # below it are roots
            self.children = Hashed()

    return __init__
