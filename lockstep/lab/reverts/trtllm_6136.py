"""A dummy request at the front shifted the cache offsets of every request.

Summary:
A dummy request was put first in the batch, while offsets computed earlier assumed that real
requests come first.
Motivation:
Dummy requests keep ranks in step when one has no work. Their place in the batch looks arbitrary
(known from the issue text).
Mechanism:
1. The batch is filled up with a dummy.
2. Tables are built with the dummy in front; rows and offsets of the previous step without it.
3. Every request uses the cache offsets of its predecessor; the first one uses the dummy's.
Key functions:
TensorRT-LLM's overlap scheduler with MTP and disaggregation. Here `plan.bucket.pad_group`; "real
entries come first" is a rule of `plan.check`.
Symptom:
Accuracy loss, only when the batch had to be filled up.
Risk and impact:
Requests read each other's keys: a leak, not only an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.plan.build import indptr
from lockstep.plan.step import Bucket, Ints, PagedGroup, ints

SOURCE = "NVIDIA/TensorRT-LLM#6136"
TARGET = "lockstep.plan.bucket:pad_group"
CELLS = ("chunked/dense",)
RELATED = ("sglang-27343", "vllm-43810")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def pad_group(group: PagedGroup, g: int, bucket: Bucket, pads: Ints, positions: Ints) -> Any:
        padded = old(group, g, bucket, pads, positions)
        dummies, held = indptr(-(-pads // group.spec.page_size)), group.page_indptr[-1]
        page_ids = np.zeros_like(padded.page_ids)
        page_ids[dummies[-1] : dummies[-1] + held] = group.page_ids[:held]
        return replace(
            padded,
            page_ids=ints(page_ids),
            page_indptr=ints([*dummies, *(dummies[-1] + group.page_indptr[1:])]),
        )

    return pad_group
