"""Two conversations were mixed because blocks were looked up by position alone.

Summary:
In a cache that several sequences share, a map from position to block had no sequence in its key.
Motivation:
With one sequence, the position is a sufficient key. The shared cache was added later (known from
the issues).
Mechanism:
1. Sequence A fills block k of its positions, and sequence B fills its own block k.
2. The map has one entry for k: the later one.
3. Both sequences attend to B's block.
Key functions:
llama.cpp's unified KV cache. Here `attention.base.addresses`, where a request's pages are found
through its own part of the page table.
Symptom:
Answers to one user contain the other's context, with two or more parallel sequences.
Risk and impact:
A leak between users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan.image import PlanArrays
from lockstep.types import GroupSpec

SOURCE = "ggml-org/llama.cpp#27994, #27752"
TARGET = "lockstep.attention.base:addresses"
CELLS = ("chunked/dense",)
RELATED = ("trtllm-12306", "trtllm-6136")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def addresses(spec: GroupSpec, views: PlanArrays) -> Any:
        page_ids, page_indptr, first_pos, size = old(spec, views)
        ids, ends = np.array(page_ids, np.int32), np.asarray(page_indptr)
        nth = np.arange(ends[-1]) - np.repeat(ends[:-1], np.diff(ends))
        block = np.zeros(len(ids) + 1, np.int32)
        block[nth] = ids[: ends[-1]]
        ids[: ends[-1]] = block[nth]
        return ids, page_indptr, first_pos, size

    return addresses
