"""Pages were accounted for in the first group only.

Summary:
In every group, free + cached + held pages must equal all pages. The comparison of reference counts
and holders ended after the first group.
Motivation:
Groups grow and end together, so a leak in one is usually a leak in all.
Mechanism:
1. A model has a group with all keys and one with a window, each with its own pages.
2. A code path gives back the pages of the first group and forgets the second.
3. The account of the first group is right, and the second is not checked until it runs out of
   pages.
Key functions:
`kv.prefix.Prefix.check`, called by the engine when it is idle.
Symptom:
None at first; after hours requests wait for pages that no request holds.
Risk and impact:
The leak itself is another bug. This one lets it through, and disarms every cell that relies on the
account.
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
