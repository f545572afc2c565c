"""Moves done one by one instead of gathered and scattered together: equivalent today.

Summary:
`moves` are specified as "gather all, then scatter all". Done one after another, a target that is
also a later source would be read after it was overwritten.
Motivation:
The plan's definition states the rule; engines that shift caches in place have broken it.
Mechanism:
1. Row a is copied to b, then row b to c.
2. In sequence, c gets a's content.
Key functions:
`kv.pool.Pool.move`, which indexes once; `kv.tables.PageTable.fork` and `accept`, the only sources
of moves.
Symptom:
None.
Risk and impact:
An equivalent mutant today. A third source of moves, such as compaction, would invalidate the proof;
then this revert needs a recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

SOURCE = "design, moves: gather all, then scatter all"
TARGET = "lockstep.kv.pool:Pool.move"
CELLS = ("fork/dense",)
RELATED = ("llamacpp-14742",)
EQUIVALENT = (
    "No slot is source and target of one step. accept() moves from scratch pages to committed "
    "pages of the same request, and a page is "
    "only ever one of the two. fork() moves from a page of the parent, held until then, to a page "
    "just taken for the child; no other move "
    "can name that page as its source, because forking a request whose moves are pending is "
    "refused. Pages that two requests write are "
    "distinct. Hence the order of the copies does not matter."
)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def move(self: Any, moves: Tensor) -> None:
        for one in moves:
            old(self, one[None])

    return move
