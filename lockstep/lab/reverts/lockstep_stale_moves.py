"""Entries that pad a list of moves kept the moves of an earlier step.

Summary:
A step relocates some keys; the list is padded to a power of two with moves of the null page to
itself. Only the real entries were written.
Motivation:
Padding that is never looked at need not be written: true of rows, not of moves, which are all
carried out.
Mechanism:
1. A step forks a request and moves four keys: four entries.
2. A later one moves three: three entries are written, the fourth is the old one.
3. The launch carries out all four, and overwrites a key of whoever holds the page now.
Key functions:
`plan.image.write`, which writes every entry of every array for every step.
Symptom:
A key of a running request is replaced by that of another, some time after a fork.
Risk and impact:
Silent; needs two forks in one bucket and a page that changed hands in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: stale padding (compare sgl-project/sglang#13740)"
TARGET = "lockstep.plan.image:write_group"
CELLS = ("engine-replay/llama",)
RELATED = ("lockstep-pad-tokens", "llamacpp-14742")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def write_group(own: Any, plan: Any, group: Any) -> None:
        before = own.moves.copy()
        old(own, plan, group)
        pads = ~own.moves.any(1)
        own.moves[pads] = before[pads]

    return write_group
