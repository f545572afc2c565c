"""A recorded launch wrote its keys to the slots of the recorded step.

Summary:
Write slots were converted to int64 on the host, into a new tensor per step. A captured launch keeps
the first of these tensors.
Motivation:
torch indexes with int64. The conversion was done where the step is prepared, not inside the launch.
Mechanism:
1. A step is recorded; its write slots are a tensor of that step.
2. On every replay the keys of the new tokens go to the slots of the recorded step.
3. The rows read their own slots, which were not written, and another request's page is overwritten.
Key functions:
`kv.pool.KvWriter`: the launch itself converts the slots, from the arena.
Symptom:
The first replayed token is wrong, and so are the requests whose pages were overwritten.
Risk and impact:
Keys of one request end up in the cache of another, and permanently in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.lab.reverts import copied_once

SOURCE = "class: a slot that a graph does not read (compare sgl-project/sglang#27360, #32555)"
TARGET = "lockstep.kv.pool:KvWriter.__init__"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
RELATED = ("sglang-27360", "vllm-43810")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, pool: Any, views: Any) -> None:
        slots = copied_once(views.write_slots)
        old(self, pool, replace(views, write_slots=slots))

    return __init__
