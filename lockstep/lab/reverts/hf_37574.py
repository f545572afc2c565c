"""At exactly the window's length the cache dropped a key too early.

Summary:
A sliding cache shifts when it is full. When the length equalled the window it took the wrong
branch.
Motivation:
"Full" and "about to overflow" differ by one, and only at one length.
Mechanism:
1. The cache has w keys; the next token arrives.
2. The comparison treats length == window as already past it.
3. The oldest key that the next row may still see is gone, or is at the wrong place.
Key functions:
transformers' sliding and hybrid caches (known from the issues). Here `kv.tables.keep_from`, the
first position the next row can see.
Symptom:
Wrong at one length, then plausible again. With large pages it shows only where the frontier meets a
page boundary; the lab therefore also runs every recipe with pages of 1.
Risk and impact:
Silent; tests at w - 1 and w + 1 pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.types import GroupSpec

SOURCE = "huggingface/transformers#37574, also #38156"
TARGET = "lockstep.kv.tables:keep_from"
CELLS = ("window-edges/window",)
RELATED = ("sglang-16507", "hf-29623", "sglang-32087")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def keep_from(spec: GroupSpec, committed_len: int) -> Any:
        return old(spec, committed_len + 1)

    return keep_from
