"""Only the first group of a plan was checked.

Summary:
A model with windows keeps its keys in two groups, each with its own pages. The check covered only
the first group.
Motivation:
Most models have one group, and an error in one group often affects both.
Mechanism:
1. A step is planned for a full group and a window group.
2. The full group is checked; the loop ends after it.
3. Lengths, tables and slots of the window group may have any value.
Key functions:
`plan.check.check`.
Symptom:
None, as long as plans are right. A guard is judged by what it refuses.
Risk and impact:
Windows release pages and reuse them early, so the unchecked group is the one where stale tables do
harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

SOURCE = "class: a guard that is blind for one group"
TARGET = "lockstep.plan.check:check"
CELLS = ("decode/window", "verify-tree/window")
RELATED = ("lockstep-draft-claim", "vllm-51756")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def check(plan: Any, pool_pages: tuple[int, ...]) -> None:
        old(replace(plan, groups=plan.groups[:1]), pool_pages[:1])

    return check
