"""The matched length was taken from one kind of layer instead of the minimum over all.

Summary:
With windows of different lengths, the number of tokens that a new request may skip is one number
for all layers. It was set once per window, and the last value won.
Motivation:
Every kind of layer has its own pool and looks up its own blocks.
Mechanism:
1. Full layers still have the whole prefix; the window layers have lost part of theirs to eviction.
2. The request starts after the longer prefix.
3. Its rows in window layers look for keys that are not there.
Key functions:
Block reuse with variable windows in TensorRT-LLM. Here `kv.prefix.Prefix._longest`, which ends
where every window is whole.
Symptom:
Accuracy falls when the cache is under pressure; a miss gives the right answer.
Risk and impact:
Silent, and only for models with windows. A hit must be compared with a miss after evictions, not in
a fresh cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

SOURCE = "NVIDIA/TensorRT-LLM#10875"
TARGET = "lockstep.kv.prefix:Prefix._longest"
CELLS = ("engine-evict/qwen3", "engine-evict/gpt-oss")
RELATED = ("sglang-17061", "sglang-16507", "vllm-51756")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _longest(self: Any, top: Any, ahead: int, ids: Sequence[int], last: int) -> Any:
        node = top
        while node.end + self.unit <= last:
            child = node.children.get(tuple(ids[node.end : node.end + self.unit + ahead]))
            if child is None:
                break
            node = child
        return node

    return _longest
