"""A step that filled its bucket was padded to the next one, and the largest step had none.

Summary:
Counts are rounded up to the bucket sizes. A count that equals a bucket size was rounded up to the
next size too.
Motivation:
`bisect` has a left and a right variant; they agree on all other counts.
Mechanism:
1. Buckets have room for 1, 2, 4, ..., 64 requests. A step has 4.
2. It runs in the bucket of 8: twice the work, and a different captured graph.
3. A step of 64 finds no bucket and is refused, although the scheduler was allowed to build it.
Key functions:
`plan.bucket.Buckets._round`.
Symptom:
Half the speed at powers of two; an error at full load.
Risk and impact:
Bits do not change, so comparisons of answers show nothing until a step fills the last bucket.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from lockstep.types import RuleError

SOURCE = "class: a capacity off by one"
TARGET = "lockstep.plan.bucket:Buckets._round"
CELLS = ("capacity/llama",)
RELATED = ("lockstep-arena-full", "sglang-27343")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _round(self: Any, n: int, what: str) -> int:
        grid = self.grid(what)
        at = bisect_right(grid, n)
        if n and at == len(grid):
            raise RuleError(
                f"a step has at most {grid[-1]} {what}",
                str(n),
                "Schedule less, or allow a larger bucket",
            )
        return int(grid[at]) if n else 0

    return _round
