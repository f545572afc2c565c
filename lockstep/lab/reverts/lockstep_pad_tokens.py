"""Padding shifted the tokens of a step relative to their rows.

Summary:
A plan is padded after its real rows; its tokens were padded before them.
Motivation:
Left padding is how batches of prompts are made elsewhere, but rows of a step are not prompts.
Mechanism:
1. A step of 5 rows runs in a bucket of 8.
2. Its plan has the pad requests last. Its tokens are 0, 0, 0 and then the five.
3. Rows 0 to 2 are computed for token 0, and the keys of the wrong tokens stay in the cache.
Key functions:
`plan.image.write`, which writes the tokens first and 0 for every row after them.
Symptom:
Wrong text as soon as a step is padded; right text whenever it fills its bucket.
Risk and impact:
Every padded step is wrong. No engine had ever run a padded step, so no test would have shown it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

SOURCE = "class: padding on the other side (compare NVIDIA/TensorRT-LLM#6136)"
TARGET = "lockstep.plan.image:write"
CELLS = ("engine-pad/llama", "engine-pad/bart")
RELATED = ("trtllm-6136", "sglang-27343")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def write(image: Any, layout: Any, plan: Any, ids: Any) -> Any:
        views = old(image, layout, plan, ids)
        views[0].ids[:] = np.roll(views[0].ids, plan.bucket.tokens - len(ids))
        return views

    return write
