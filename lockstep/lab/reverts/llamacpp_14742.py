"""Only the first of several caches was moved.

Summary:
Positions in the cache are shifted when a context overflows. With several streams the loop went over
the first one only.
Motivation:
The cache became an array of streams; one loop still had a single one in mind (known from the
issue).
Mechanism:
1. A relocation is asked for.
2. It is carried out in stream 0.
3. All other streams keep their rows where nobody will look for them.
Key functions:
llama.cpp's K-shift. Here `kv.pool.Pool.move`, which relocates rows in the storages of every layer;
the revert stops after the first.
Symptom:
The first stream is right, the others read old places.
Risk and impact:
Silent; a test with one stream, or one layer, cannot see it. All features of the lab have two
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

SOURCE = "ggml-org/llama.cpp#14742"
TARGET = "lockstep.kv.pool:Pool.move"
CELLS = ("fork/dense",)
RELATED = ("lockstep-move-order", "trtllm-12306")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def move(self: Any, moves: Tensor) -> None:
        every, self.storages = self.storages, self.storages[:1]
        try:
            old(self, moves)
        finally:
            self.storages = every

    return move
