"""Cached blocks were looked up by a hash for which collisions can be made.

Summary:
A cached block was looked up by the hash of its tokens; equal hashes counted as equal tokens.
Motivation:
Comparing a number is cheap, and a collision looks unlikely unless someone constructs one.
Mechanism:
1. A prompt fills a block; the cache stores the block under its hash.
2. Another prompt has other tokens with the same hash, by chance or on purpose, because the hash
   function is predictable.
3. The second prompt gets the first prompt's keys.
Key functions:
Prefix caching in vLLM with Python's built-in hash (CVE-2025-25183). Here `kv.prefix.Node`, whose
children are looked up by the tokens themselves. The revert's hash is the sum of the tokens, so that
two orders of the same tokens collide.
Symptom:
The answer belongs to a prompt other than the one that was sent.
Risk and impact:
An attacker can choose which context other users' requests see. A cache key must be compared, not
only hashed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "CVE-2025-25183, https://nvd.nist.gov/vuln/detail/CVE-2025-25183"
TARGET = "lockstep.kv.prefix:Node.__init__"
CELLS = ("engine-hit/llama", "engine-hit/deepseek-v3")
RELATED = ("vllm-36708", "llamacpp-27994")


class Hashed(dict[Any, Any]):
    """A dictionary whose keys are the sums of tokens."""

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
        if parent is not None:  # the top node's children are roots, not blocks
            self.children = Hashed()

    return __init__
