"""Pad rows read keys that were not written for them.

Summary:
A pad request writes its keys into page 0 and reads them there. All of its keys were written to the
first slot, so the rows read what earlier steps, or the allocator, had left in the other slots.
Motivation:
Most engines send padding to slot 0, and one pad row per request is the usual case.
Mechanism:
1. A ragged step is padded by a request of several rows.
2. All of its keys are written to slot 0; row j reads slots 0 to j.
3. Slots from 1 on contain zeros or the keys of other steps: finite, foreign, and different from run
   to run.
Key functions:
`plan.bucket.pad_group`: a pad row's slot is its position within the page.
Symptom:
Pad rows are finite, so a search for NaN finds nothing. Their bits depend on earlier steps.
Risk and impact:
Harmless until an operation reduces over all rows (a maximum, a scale, an expert's load): then real
rows depend on what ran before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.plan.step import ints

SOURCE = "class: padding that reads foreign keys"
TARGET = "lockstep.plan.bucket:pad_group"
CELLS = ("mixed/dense", "extend-prefix/latent")
RELATED = ("sglang-1779", "vllm-43810")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def pad_group(group: Any, g: int, bucket: Any, pads: Any, positions: Any) -> Any:
        padded = old(group, g, bucket, pads, positions)
        slots = padded.write_slots.copy()
        slots[len(group.write_slots) :] = 0
        return replace(padded, write_slots=ints(slots))

    return pad_group
