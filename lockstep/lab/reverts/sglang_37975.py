"""A table's offsets were updated in the eager path's buffer, but the replay read another one.

Summary:
Two paths prepare the same metadata: one for eager steps, one for graphs. The offsets of the page
table were updated only in the eager path's memory.
Motivation:
Replay was meant to skip the preparation; the parts it needed after all were added path by path.
Mechanism:
1. A decode step is recorded: request i finds its pages from page_indptr[i] on.
2. Some requests grow by a page and others end, so the offsets move.
3. The replay uses the offsets of the recorded step with the pages of this one.
Key functions:
FlashInfer's MLA backend in SGLang. Here `attention.base.addresses`, the only function that gives a
backend its page table.
Symptom:
Hidden until another kernel reads the stale offsets. Here a request reads its neighbour's pages.
Risk and impact:
Content of other requests, without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.lab.reverts import copied_once

SOURCE = "sgl-project/sglang#37975 (issue)"
TARGET = "lockstep.attention.base:addresses"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
CRASH = True  # stale addresses may be outside the cache
RELATED = ("sglang-27664", "trtllm-12306")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def addresses(spec: Any, views: Any) -> Any:
        page_ids, page_indptr, first_pos, size = old(spec, views)
        return page_ids, copied_once(page_indptr), first_pos, size

    return addresses
