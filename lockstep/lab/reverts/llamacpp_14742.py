"""Only the first of several cache streams was moved.

Summary:
Positions in the cache are shifted when a context overflows. With several streams the loop covered
only the first one.
Motivation:
The cache became an array of streams; one loop was still written for a single stream (known from the
issue).
Mechanism:
1. A move is requested.
2. It is carried out in stream 0.
3. All other streams keep their rows at the old places, where they are no longer read.
Key functions:
llama.cpp's K-shift. Here `kv.pool.Pool.move`, which moves rows in the storage of every layer; the
revert stops after the first layer.
Symptom:
The first stream is right; the others read old places.
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
