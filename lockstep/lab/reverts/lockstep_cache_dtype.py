"""The requested KV cache dtype was dropped.

Summary:
kv_cache_dtype was accepted and printed but not passed on: the cache was float32.
Motivation:
An argument with a default is easily left out of a call, and float32 only makes the results more
accurate.
Mechanism:
1. A user asks for a cache in bfloat16.
2. The model's groups are made with the default dtype.
3. Keys are stored in float32.
Key functions:
`run.kind.kinds_of`, which makes the groups with the requested dtype.
Symptom:
Twice the memory, and answers that differ from those of another machine with the same options.
Risk and impact:
Equal options no longer give equal bits, and models that should fit do not. A comparison with a
float32 oracle finds nothing wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: options accepted and dropped"
TARGET = "lockstep.run.kind:kinds_of"
CELLS = ("engine-dtype/llama", "engine-dtype/deepseek-v3")
RELATED = ("lockstep-dropped-limits",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def kinds_of(
        model: Any,
        page_size: int = 16,
        kv_dtype: str = "float32",
        first_group: int = 0,
        hidden_layers: tuple[int, ...] = (),
    ) -> Any:
        return old(model, page_size, "float32", first_group, hidden_layers)

    return kinds_of
