"""The guard of shared pages did not check a draft step's own page.

Summary:
A request may write its pages from the point where its new keys begin, and no other request may hold
those pages. For rows of a tree the guard began at the first row's position, which is past the keys
of earlier draft steps.
Motivation:
For a plain row, its position is where its keys begin. For a tree node, its position is where its
key goes if the node is accepted.
Mechanism:
1. A draft has run for some steps. Its rows are two or more positions past the committed length.
2. The guard claims the pages from that position on. The page that contains the committed length is
   not among them.
3. Another request holds that page by mistake. Accepted nodes are later moved into it and overwrite
   the other request's keys.
Key functions:
`plan.check.assign_owners`, compiled into `judge_group`. The first written position is the smaller
of a row's `start` and its position.
Symptom:
None by itself: a guard with a blind spot is found only by showing it a bad plan.
Risk and impact:
A wrong fork is caught in prefill and decode but passes in the draft steps of speculation, where
forks are many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from lockstep.kernels.cpu.threads import relinked
from lockstep.plan import check

SOURCE = "class: a guard that is blind in one kind of step"
TARGET = "lockstep.plan.check:compiled"
CELLS = ("draft-decode/dense", "draft-decode/window")
RELATED = ("sglang-27360", "trtllm-12306")


def assign_owners(rows: Any, arrays: Any, size: int, owner: Any) -> int:
    """Claims pages from the first row's position on, ignoring where its keys start."""
    (q, positions, _, _), (_, indptr, pages, first_pos, _, _) = rows, arrays
    first = np.empty(len(q) - 1, np.int64)
    for i in range(len(q) - 1):
        first[i] = indptr[i + 1]
        if q[i] < q[i + 1]:
            first[i] = min(
                indptr[i + 1], indptr[i] + max(0, positions[q[i]] - first_pos[i]) // size
            )
        for k in range(first[i], indptr[i + 1]):
            if pages[k] and owner[pages[k]] >= 0:
                return k
            if pages[k]:
                owner[pages[k]] = i
    for i in range(len(q) - 1):
        for k in range(indptr[i], first[i]):
            if owner[pages[k]] >= 0:
                return k
    return -1


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> tuple[Any, Any]:
        names = {**vars(check), "assign_owners": njit(assign_owners)}
        return old()[0], njit(relinked(check.judge_group, names))

    return compiled
