"""The dtype of the cache was dropped on the way.

Summary:
kv_cache_dtype was accepted, printed, and not handed on: the cache held float32.
Motivation:
A parameter with a default is easily left out of a call, and everything works better without it.
Mechanism:
1. A user asks for a cache in bfloat16.
2. The groups of the model are made with their default.
3. Keys are kept in float32.
Key functions:
`run.kind.kinds_of`, which makes the groups with the dtype that was asked for.
Symptom:
Twice the memory, and answers that another machine with the same options does not give.
Risk and impact:
The promise of equal bits for equal options; sizes that do not fit. Who compares with a float32
oracle finds all well.
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
