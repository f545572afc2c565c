"""Window pages were released while a step in flight still needed them.

Summary:
Pages before the window are released as a request advances. The release frontier was computed from a
length that ran ahead of the work.
Motivation:
With overlapped scheduling the host plans the next chunk while the device still reads for this one;
rounding to pages adds its own error.
Mechanism:
1. The frontier is computed from the length after a chunk that is only planned.
2. Pages that hold keys inside the window of the running rows are freed.
3. Another request takes and overwrites them.
Key functions:
The sliding-window eviction of SGLang's scheduler. Here `kv.tables.keep_from`: pages are released by
the committed length. The revert runs one page ahead.
Symptom:
Wrong values in window layers, under load, with pages larger than 1. Freed pages are poisoned in the
lab, so that a late read shows.
Risk and impact:
Requests read each other's keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#16507"
TARGET = "lockstep.kv.tables:keep_from"
CELLS = ("window-edges/window",)
RELATED = ("hf-37574", "trtllm-12306")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def keep_from(spec: GroupSpec, committed_len: int) -> Any:
        return min(old(spec, committed_len + spec.page_size), committed_len)

    return keep_from
