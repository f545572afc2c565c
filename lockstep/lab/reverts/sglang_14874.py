"""The key lists of draft rows were written with the bucket's stride and read with their own.

Summary:
A padded draft step has room for more rows and longer lists than it uses. Lists were written at the
bucket's stride, and read at the stride of the real rows.
Motivation:
Buffers are made for the largest step, and a table of the bucket's shape looks like the natural
layout.
Mechanism:
1. A draft step of a few branches runs in the shape of a larger one.
2. Its lists are broadcast over the rows and columns of the bucket.
3. Row r reads where its list begins in the packed layout: in the middle of another row's list.
Key functions:
SGLang's draft decode with top-k above 1 under padding, where the shapes did not even agree. Here
`plan.bucket.pad_group`: lists are stored one after the other, and pads add zeros at the end.
Symptom:
Upstream a shape error. Here branches attend to keys of other branches, in padded steps only.
Risk and impact:
Every step without padding is right, and so is a step that fills its bucket.
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
