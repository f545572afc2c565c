"""Every request of a step got the embedding of the first one.

Summary:
Several prompts are embedded in one step. Each request received the vector of the first.
Motivation:
The index is right for one prompt, and most calls have one.
Mechanism:
1. Three prompts are embedded in one call, in one step.
2. Their rows are pooled into three vectors.
3. All requests get vector 0.
Key functions:
`nn.layers.pool`, which pools each request's rows into one vector.
Symptom:
All texts of a batch are equally similar to any other text.
Risk and impact:
A search index filled in batches is worthless, and nothing fails: every vector has length 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a batch's first result for every request"
TARGET = "lockstep.nn.layers:pool"
CELLS = ("engine-embed/llama", "engine-embed/gpt-oss")
RELATED = ("sglang-27343",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def pool(ops: Any, hidden: Any, q_indptr: Any, how: str) -> Any:
        vectors = old(ops, hidden, q_indptr, how)
        return vectors[:1].expand(len(vectors), -1).contiguous()

    return pool
