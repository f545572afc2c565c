"""A captured launch covered the rows of the captured step instead of those of its bucket.

Summary:
Rows are computed in blocks. The list of blocks was taken from the recorded step, not from the size
of its bucket.
Motivation:
Blocks of pad requests compute rows that are never read, so leaving them out saves time in the
recorded step.
Mechanism:
1. A step of five requests is recorded in a bucket of eight; blocks after the fifth request are
   empty and left out.
2. A step of eight requests of the same bucket is replayed.
3. The last three are not computed; their rows keep the previous contents of the memory.
Key functions:
Piecewise graphs with FlashInfer's ragged wrapper in SGLang (#20061, #21452, #17706: qo_indptr did
not cover padded tokens). Here `attention.cpu.Backend.bind`.
Symptom:
Wrong prefill for some batch sizes. Here requests of a fuller bucket get the attention output of an
earlier step.
Risk and impact:
It depends on which step of a bucket ran first.
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
        page = views.page_ids.numpy()[views.page_indptr.numpy()[request]]  # 0 for a pad request
        real = int(((page > 0) & (end > begin)).sum())
        derived = views.derived[: 2 * bucket.tokens + 3 * real]
        return old(self, spec, bucket, replace(views, derived=derived), variant)

    return bind
