"""Branches and steps of a draft were transposed.

Summary:
The slots of draft tokens were viewed as [steps, branches] and transposed although their layout is
[branches, steps].
Motivation:
The two axes of a flat array are easily confused, and a reshape always succeeds.
Mechanism:
1. out_cache_loc has, for each request and branch, the slots of all steps.
2. Draft decoding views it with the axes exchanged.
3. A branch attends to the tokens of other branches at other depths.
Key functions:
Draft decode in SGLang's FlashAttention backend. Here `plan.build.paths`: a row's list is its own
path along `parents`, so there is no grid whose axes could be exchanged. The revert reads the
ancestors through the transposed grid; the row's own slot stays.
Symptom:
None with one request or one branch; otherwise drafts are worse and the acceptance rate falls. The
output stays right, since the target model decides.
Risk and impact:
A silent loss of speed; only a comparison branch by branch, with distinct keys, shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

SOURCE = "sgl-project/sglang#7239"
TARGET = "lockstep.plan.build:paths"
CELLS = ("draft-decode/dense",)
RELATED = ("sglang-15469", "sglang-27360")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def paths(parents: Sequence[int], new_len: int) -> Any:
        steps = len(parents) // new_len
        grid = [node % new_len * steps + node // new_len for node in range(steps * new_len)]
        return [
            [*(grid[node] if node < len(grid) else node for node in path[:-1]), path[-1]]
            for path in old(parents, new_len)
        ]

    return paths
