"""Draft tokens were stored by a position that was not their index in the sequence.

Summary:
The slot of a token was computed from the first component of a multimodal position instead of the
token's index.
Motivation:
For text both are the same number. With images, positions repeat or jump (known from the issue).
Mechanism:
1. A model with three-part rotary positions drafts.
2. positions[0] is used as the number of keys before the row.
3. Keys are written to slots of earlier tokens of the same request.
Key functions:
vLLM's EAGLE proposer. Here `plan.build.write_slots`, which uses the position that also decides what
a row sees. The revert numbers a request's rows from 0.
Symptom:
The prefix is overwritten and the new places stay empty.
Risk and impact:
Silent as long as only the draft model is affected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.build import BatchWork
from lockstep.types import GroupSpec

SOURCE = "vllm-project/vllm#54498"
TARGET = "lockstep.plan.build:write_slots"
CELLS = ("chunked/dense",)
RELATED = ("sglang-29616", "sglang-8622")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def write_slots(spec: GroupSpec, work: BatchWork, rows: Any, group: tuple[Any, ...]) -> Any:
        shape = work.shape
        nth = np.arange(len(rows.positions), dtype=np.int32) - shape.q_indptr[shape.request]
        return old(spec, work, rows._replace(positions=nth), group)

    return write_slots
