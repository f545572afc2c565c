"""A partly filled page was shared instead of copied.

Summary:
Two requests that continue one prefix may share its pages as long as neither writes to them. The
last, partly filled page was shared too.
Motivation:
Reuse saves the copy of a block, and one comparison decides whether a block is full enough to be
shared (known from the issue).
Mechanism:
1. A prefix ends in the middle of a page.
2. The new request takes a reference to that page as to all others.
3. Both write their next token into the same slot.
Key functions:
Block reuse of TensorRT-LLM. Here `kv.tables.shared_pages`: only pages wholly below the committed
length are shared. The partial page is moved into a page that the fork owns.
Symptom:
Both continuations attend to whichever token was written last.
Risk and impact:
Content of one answer appears in another. `plan.check` refuses a page that one request writes while
another holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.types import GroupSpec

SOURCE = "NVIDIA/TensorRT-LLM#12306"
TARGET = "lockstep.kv.tables:shared_pages"
CELLS = ("fork/dense",)
RELATED = ("sglang-29352", "sglang-16507", "llamacpp-27994")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def shared_pages(spec: GroupSpec, pages: list[int], first_pos: int, length: int) -> Any:
        return old(spec, pages, first_pos, -(-length // spec.page_size) * spec.page_size)

    return shared_pages
