"""Pad rows had slot -1, and -1 is the last slot.

Summary:
Pad rows of a captured step have the slot -1, meaning "do not write". A write that indexes with it
hits the last slot of the pool.
Motivation:
-1 as "nowhere" is a convention between two pieces of code; array indexing has a different one.
Mechanism:
1. A step is padded; the pad rows' slots are PADDING_SLOT_ID = -1.
2. A store that does not test for it runs `cache[slots] = rows`.
3. The request that owns the last slot of the pool has lost a key.
Key functions:
Slot mappings of vLLM under graphs (known from the issue). Here `plan.bucket.pad_group`: pad rows
write to page 0, which is never handed out, so no number has a second meaning. Our store refuses a
negative slot, so the revert uses the last slot that the step writes.
Symptom:
One request in the whole pool gets wrong answers, and only while the pool is full enough.
Risk and impact:
Silent corruption that depends on load; nearly impossible to reproduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.plan.step import Bucket, Ints, PagedGroup, ints

SOURCE = "vllm-project/vllm#43810"
TARGET = "lockstep.plan.bucket:pad_group"
CELLS = ("decode/dense",)
RELATED = ("trtllm-6136", "sglang-27343")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def pad_group(group: PagedGroup, g: int, bucket: Bucket, pads: Ints, positions: Ints) -> Any:
        padded = old(group, g, bucket, pads, positions)
        slots = padded.write_slots.copy()
        slots[len(group.write_slots) :] = group.write_slots.max(initial=0)
        return replace(padded, write_slots=ints(slots))

    return pad_group
