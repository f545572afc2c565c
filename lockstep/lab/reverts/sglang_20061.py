"""A captured launch covered the rows of the captured step and not those of its bucket.

Summary:
Rows are computed in blocks. Which blocks there are was taken from the step that was recorded,
without the room that its bucket has.
Motivation:
Blocks of pad requests compute what nobody reads; leaving them out saves time, once.
Mechanism:
1. A step of five requests is recorded in a bucket of eight; blocks behind the fifth are empty and
   left out.
2. A step of eight requests of the same bucket is replayed.
3. Nobody computes the last three; their rows keep what the memory held.
Key functions:
Piecewise graphs with FlashInfer's ragged wrapper in SGLang (#20061, #21452, #17706: qo_indptr did
not cover padded tokens). Here `attention.cpu.Backend.bind`.
Symptom:
Wrong prefill for some batch sizes. Here requests of a fuller bucket get the attention of an earlier
step.
Risk and impact:
Depends on which step of a bucket came first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

SOURCE = "sgl-project/sglang#20061, #21452"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
RELATED = ("sglang-27343", "sglang-27664")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: Any, bucket: Any, views: Any, variant: Any) -> Any:
        request, begin, end = views.derived[2 * bucket.tokens :].view(-1, 3).numpy().T
        page = views.page_ids.numpy()[views.page_indptr.numpy()[request]]  # 0: a pad's
        real = int(((page > 0) & (end > begin)).sum())
        derived = views.derived[: 2 * bucket.tokens + 3 * real]
        return old(self, spec, bucket, replace(views, derived=derived), variant)

    return bind
