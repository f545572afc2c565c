"""Experts with equal scores were chosen in the order in which a sort happened to leave them.

Summary:
A router picks the k best experts; among equals the smaller id. A sort that is not stable decides by
its own inner workings.
Motivation:
`topk` and an unstable sort are faster, and with 16 experts or fewer torch's happens to be stable.
Mechanism:
1. Two experts have the same score: weights that were merged or pruned, a router in a narrow format,
   a row of zeros.
2. From 17 experts on the sort partitions, and equal elements change places.
3. Which expert computes the row depends on the library, its version and the vector width.
Key functions:
`kernels.cpu.routing.best`.
Symptom:
A row's result changes with the version of a library; within one process everything agrees with
itself.
Risk and impact:
Equal fingerprints, different bits, on models with many experts. Tiny models with four of them see
nothing.
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
