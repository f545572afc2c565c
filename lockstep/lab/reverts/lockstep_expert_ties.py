"""Experts with equal scores were chosen in the arbitrary order of an unstable sort.

Summary:
A router picks the k best experts, and among equal scores the smaller id. An unstable sort breaks
ties by its internals instead.
Motivation:
`topk` and an unstable sort are faster, and torch's happens to be stable for up to 16 experts.
Mechanism:
1. Two experts have the same score: weights that were merged or pruned, a router in a narrow format,
   a row of zeros.
2. From 17 experts on the sort partitions its input, and equal elements change places.
3. Which expert computes the row depends on the library, its version and the vector width.
Key functions:
`kernels.cpu.routing.best`.
Symptom:
A row's result changes with the library version; within one process all results agree.
Risk and impact:
Equal fingerprints with different bits, on models with many experts. Tiny models with four experts
cannot show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

SOURCE = "class: ties in the order of an unstable sort"
TARGET = "lockstep.kernels.cpu.routing:best"
CELLS = ("experts/llama",)
RELATED = ("lockstep-noisy-tie", "sglang-27869")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def best(scores: Tensor, k: int) -> Any:
        return scores.argsort(dim=-1, descending=True, stable=False)[:, :k]

    return best
