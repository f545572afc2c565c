"""A block was found in the cache by its own tokens, though its draft keys are of one token more.

Summary:
The prefix tree named blocks by their tokens. A head's key at p is of token p + 1, so the last key
of a block depends on a token behind it.
Motivation:
For the target the tokens of a block and those before it say everything.
Mechanism:
1. A request leaves blocks in the tree, with the keys of both models.
2. Another one has the same block, and another token behind it.
3. It takes over the draft's last key, which is of the first one's token.
Key functions:
SGLang's radix cache with EAGLE (#11231 too), fixed by keys of two tokens. Here
`kv.prefix.Root.ahead`: a block's name has one token more. With the bug `Prefix._longest` takes a
block whose own tokens are the same.
Symptom:
Acceptance depends on what was asked before: lower with a warm cache than with a cold one.
Risk and impact:
Silent, and only where prompts part at the end of a block: system prompts do.
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
