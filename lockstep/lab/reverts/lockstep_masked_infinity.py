"""A value that overflowed reached rows that do not see its key.

Summary:
Rows are computed four at a time over the union of the keys that they see. A key that a row does not
see has weight 0, and 0 times infinity is NaN.
Motivation:
Adding a product with 0 is cheaper than a branch, and right for every finite number.
Mechanism:
1. A prefill computes the rows at positions 12 to 15 together, over keys 0 to 15.
2. The value of key 13 overflowed to infinity, which is the model's correct answer for the rows from
   13 on.
3. The row at position 12 adds 0 * infinity and becomes NaN.
4. With other chunks, or decoded one by one, it is a number: an answer depends on the batch.
Key functions:
The kernel function `finite`, which says whether rows that see different keys may share a product.
Symptom:
NaN in rows before an overflow, with some chunk sizes.
Risk and impact:
One overflow in a long prompt spoils the scores of earlier tokens, and a sampler then ends the
request with an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lockstep.kernels.cpu import attend

SOURCE = "class: a masked value that is not finite (compare sgl-project/sglang#33974)"
TARGET = "lockstep.attention.cpu:kernel"
BACKEND = "cpu"
CELLS = ("overflow/dense", "overflow/bf16-kv")
RELATED = ("sglang-33974", "vllm-28181")


def finite(scratch: Any, reach: Any) -> Any:
    """Skips the check for infinities."""
    return True


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def kernel() -> Any:
        return attend.build(finite=finite)

    return kernel
