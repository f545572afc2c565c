"""The encoder's keys were written to the decoder's slots.

Summary:
A step that runs an encoder has two sets of write slots, one for the decoder's rows and one for the
encoder's. The cross-attention write used the decoder's.
Motivation:
Both are fields of the same batch object and have similar names: out_cache_loc and
encoder_out_cache_loc.
Mechanism:
1. The encoder's rows are computed and their cross K/V are to be stored.
2. The write goes to the slots of this step's decoder rows.
3. Cross attention later reads the encoder's slots, where nothing was written.
Key functions:
The torch_native backend of SGLang. Here `plan.build.write_slots`: encode and decode are separate
plans, and a plan has one set of slots per group, derived from the group's pages. The revert numbers
slots consecutively through the batch instead.
Symptom:
The decoder does not see its encoder; slots of other requests are overwritten.
Risk and impact:
Silent in a pool that is not poisoned: old values look valid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.build import BatchWork
from lockstep.types import GroupSpec, Layout

SOURCE = "sgl-project/sglang#8622"
TARGET = "lockstep.plan.build:write_slots"
CELLS = ("encode-decode/cross",)
RELATED = ("sglang-19107",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def write_slots(spec: GroupSpec, work: BatchWork, rows: Any, group: tuple[Any, ...]) -> Any:
        slots = old(spec, work, rows, group)
        return (
            spec.page_size + np.arange(len(slots), dtype=np.int32)
            if spec.layout is Layout.CROSS
            else slots
        )

    return write_slots
