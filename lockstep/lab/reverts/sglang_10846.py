"""A cached block was matched by its own tokens, but its draft keys depend on one token more.

Summary:
The prefix tree keyed blocks by their tokens. A draft head's key at p is computed from token p + 1,
so the last key of a block depends on the token after the block.
Motivation:
For the target model the tokens of a block and those before it determine its keys.
Mechanism:
1. A request leaves blocks in the tree, with the keys of both models.
2. Another request has the same block, followed by another token.
3. It takes over the draft's last key, which was computed from the first request's token.
Key functions:
SGLang's radix cache with EAGLE (#11231 too), fixed by keys of two tokens. Here
`kv.prefix.Root.ahead`: a block's key has one token more. With the bug `Prefix._longest` accepts a
block if its own tokens are equal.
Symptom:
The acceptance rate depends on earlier requests: lower with a warm cache than with a cold one.
Risk and impact:
Silent, and only where prompts diverge at the end of a block, as prompts with a common system prompt
do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#10846"
TARGET = "lockstep.kv.prefix:Prefix._longest"
CELLS = ("engine-head/llama",)
RELATED = ("sglang-26800", "sglang-34870", "lockstep-unwritten-draft")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _longest(self: Any, top: Any, ahead: int, ids: Any, last: int) -> Any:
        node = old(self, top, ahead, ids, last)
        block = tuple(ids[node.end : node.end + self.unit])
        for key, child in node.children.items():
            if key[: self.unit] == block and child.end <= last:
                return child
        return node

    return _longest
