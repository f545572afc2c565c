"""What a backend had derived was copied to memory that a recorded launch does not read again.

Summary:
A planner made its metadata anew for every step, in new memory. A captured graph went on reading the
memory of the step that was captured.
Motivation:
Eagerly, new memory and refilled memory are the same; the pool of a graph even hands out the same
address for a while.
Mechanism:
1. A step is recorded: its blocks and visible ranges lie in tensors of that step.
2. The next step of the bucket derives others, elsewhere.
3. The replay reads the first ones: rows see as far as the rows of the recorded step.
Key functions:
Metadata of DeepSeek's attention under CUDA graphs in SGLang. Here `attention.cpu.Backend.bind`,
which names places in the arena; the revert gives the kernel a copy.
Symptom:
Greedy answers differ from run to run. Here a decode step that is replayed does not see its newest
keys.
Risk and impact:
Right whenever it is run without a graph, so every test that does not replay with other lengths is
green.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.lab.reverts import frozen

SOURCE = "sgl-project/sglang#27664 (issue)"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
CRASH = True  # stale addresses may lie outside of the cache
RELATED = ("vllm-35175", "sglang-37975")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: Any, bucket: Any, views: Any, variant: Any) -> Any:
        copied = frozen(views.derived)
        return old(self, spec, bucket, replace(views, derived=copied), variant)

    return bind
