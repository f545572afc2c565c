"""A draft head got the hidden states of rejected rows.

Summary:
After a tree is verified, the hidden states along the accepted path are kept for the draft head. The
first rows were kept instead, as many as were accepted.
Motivation:
In a chain they are the same: the accepted rows are the first ones.
Mechanism:
1. A tree is verified; the accepted path goes through its nodes 0, 2 and 5.
2. The hidden states of rows 0, 1 and 2 are kept as those of the new tokens.
3. The head's keys combine a token with the state of another branch.
Key functions:
Hidden states of a verify step, gathered by the accepted index. Here
`spec.model_draft.ModelDraft.observe`, which takes the rows that `SettledRows` names.
Symptom:
The acceptance rate falls with trees, not with chains. The answers stay right.
Risk and impact:
A wider tree makes drafts worse instead of better, and the head is blamed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: states of the wrong rows"
TARGET = "lockstep.spec.model_draft:ModelDraft.observe"
CELLS = ("engine-head/llama",)
RELATED = ("lockstep-branch-slots", "sglang-26800")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def observe(self: Any, settled: Any) -> None:
        rows = [
            each._replace(rows=tuple(range(each.rows[0], each.rows[0] + len(each.rows))))
            if each.rows
            else each
            for each in settled.rows
        ]
        old(self, settled._replace(rows=tuple(rows)))

    return observe
