"""A step wrote to the slots of the previous step.

Summary:
The batch object kept its write slots from one step to the next, and a path that should have
computed new ones used the old ones.
Motivation:
The batch is mutable and reused: every field that is not set again keeps an old value that looks
valid.
Mechanism:
1. A draft step runs and leaves its out_cache_loc in the batch.
2. The next step of the same shape does not allocate, because the field is filled.
3. New keys overwrite the old ones; their own slots stay empty.
Key functions:
SGLang's frozen-KV MTP; the fix sets the field to None. Here `plan.build.write_slots`: slots are
derived from positions and pages, in a plan that is frozen and made once per step.
Symptom:
The newest token's key is missing and the previous one is destroyed.
Risk and impact:
Silent corruption of the draft's cache; in a target model, of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.plan.build import BatchWork
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#29616"
TARGET = "lockstep.plan.build:write_slots"
CELLS = ("fork/dense",)
RELATED = ("flashinfer-1028", "vllm-54498")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[Any, Any] = {}

    def write_slots(spec: GroupSpec, work: BatchWork, rows: Any, group: tuple[Any, ...]) -> Any:
        return kept.setdefault((spec, len(rows.positions)), old(spec, work, rows, group))

    return write_slots
