"""The account of pages was kept for the first group only.

Summary:
free + cached + held = all, in every group. The comparison of holds and holders ended after the
first group.
Motivation:
Groups grow and end together, so what leaks in one leaks in all; mostly.
Mechanism:
1. A model has a group with all keys and one with a window, each with pages of its own.
2. A path gives the pages of the first group back and forgets the second.
3. The account of the first is right, and nobody looks at the second until it is empty.
Key functions:
`kv.prefix.Prefix.check`, called by the engine when it is idle.
Symptom:
None at first; after hours requests wait for pages that nobody has.
Risk and impact:
The leak itself is another bug; this one lets it through, and every cell that relies on the account
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

SOURCE = "class: a guard that is blind for one group"
TARGET = "lockstep.kv.prefix:Prefix.check"
CELLS = ("engine-page/qwen3", "engine-n/gpt-oss")
RELATED = ("lockstep-first-group", "sglang-27779")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def check(self: Any, tables: Iterable[Any] = ()) -> None:
        pools = self.pools
        self.pools = pools[:1]
        try:
            old(self, tables)
        finally:
            self.pools = pools

    return check
