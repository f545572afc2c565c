"""Derived metadata was put into memory that a recorded launch does not read again.

Summary:
A planner rebuilt its metadata for every step in newly allocated memory. A captured graph continued
to read the memory of the captured step.
Motivation:
In eager mode, new memory and refilled memory behave alike; a graph's memory pool even returns the
same address for a while.
Mechanism:
1. A step is recorded; its blocks and visible ranges are in tensors of that step.
2. The next step of the bucket derives its own, at other addresses.
3. The replay reads the first ones: rows see as far as the rows of the recorded step.
Key functions:
Metadata of DeepSeek's attention under CUDA graphs in SGLang. Here `attention.cpu.Backend.bind`,
which refers to places in the arena; the revert gives the kernel a copy.
Symptom:
Greedy answers differ from run to run. Here a replayed decode step does not see its newest keys.
Risk and impact:
Every run without a graph is right, so a test that does not replay with other lengths passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.lab.reverts import copied_once

SOURCE = "sgl-project/sglang#27664 (issue)"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
CRASH = True  # stale addresses may be outside the cache
RELATED = ("vllm-35175", "sglang-37975")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: Any, bucket: Any, views: Any, variant: Any) -> Any:
        copied = copied_once(views.derived)
        return old(self, spec, bucket, replace(views, derived=copied), variant)

    return bind
