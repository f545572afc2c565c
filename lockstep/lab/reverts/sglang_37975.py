"""A table's offsets were built in the buffer of the eager path, and the replay read the other one.

Summary:
Two paths prepare the same metadata: one for eager steps, one for graphs. The offsets of the page
table were refreshed in the eager one's memory only.
Motivation:
Replay was to avoid the work of preparing; what it needed after all was added path by path.
Mechanism:
1. A decode step is recorded: request i finds its pages from page_indptr[i] on.
2. Requests grow by a page, others end; the offsets move.
3. The replay uses the offsets of the recorded step with the pages of this one.
Key functions:
FlashInfer's MLA backend in SGLang. Here `attention.base.addresses`, the only place that tells a
backend where the page table lies.
Symptom:
Hidden until another kernel reads the stale offsets. Here a request reads its neighbour's pages.
Risk and impact:
Content of other requests, without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.lab.reverts import frozen

SOURCE = "sgl-project/sglang#37975 (issue)"
TARGET = "lockstep.attention.base:addresses"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
CRASH = True  # stale addresses may lie outside of the cache
RELATED = ("sglang-27664", "trtllm-12306")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def addresses(spec: Any, views: Any) -> Any:
        page_ids, page_indptr, first_pos, size = old(spec, views)
        return page_ids, frozen(page_indptr), first_pos, size

    return addresses
