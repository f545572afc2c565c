"""The key lists of draft rows were laid out for the whole bucket, and read for the rows that live.

Summary:
A padded draft step has room for more rows and longer lists than it uses. Lists were written at the
distance that the bucket has, and read at their own.
Motivation:
Buffers are made for the largest step; a table of the whole bucket looks like the natural grid.
Mechanism:
1. A draft step of a few branches runs in the shape of a larger one.
2. Its lists are broadcast over the rows and columns of the bucket.
3. Row r reads where its list begins among those that live: in the middle of another row's.
Key functions:
SGLang's draft decode with top-k above 1 under padding, where the shapes did not even agree. Here
`plan.bucket.pad_group`: lists lie one behind the other, and pads add zeros at the end.
Symptom:
Upstream an error of shapes. Here branches attend to keys of other branches, in padded steps alone.
Risk and impact:
Right in every test without padding, and wherever a bucket is full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.plan.step import ints

SOURCE = "sgl-project/sglang#14874"
TARGET = "lockstep.plan.bucket:pad_group"
CELLS = ("draft-decode/dense",)
RELATED = ("sglang-27338", "sglang-7239", "vllm-43810")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def pad_group(group: Any, g: int, bucket: Any, pads: Any, positions: Any) -> Any:
        padded, live = old(group, g, bucket, pads, positions), len(group.write_slots)
        if not bucket.tail or len(padded.tail_slots) != bucket.tokens * bucket.tail or not live:
            return padded
        grid = np.zeros((bucket.tokens, bucket.tail), np.int32)
        lists = group.tail_slots.reshape(live, -1)
        grid[:live, : lists.shape[1]] = lists
        return replace(padded, tail_slots=ints(grid.reshape(-1)))

    return pad_group
