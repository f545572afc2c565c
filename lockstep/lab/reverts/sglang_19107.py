"""The fused FP8 write put the window layers' keys into the full layers' slots.

Summary:
Window layers have their own pool and slots. A faster write for FP8 caches skipped the translation
and used full-pool slots.
Motivation:
The slot of a token is translated inside the ordinary write. The fused kernel replaces that write,
including the translation.
Mechanism:
1. With an FP8 cache the step uses the fused quantise-and-store kernel.
2. The kernel gets the untranslated slots, which are the full pool's.
3. The window pool is written at these indices; reads are translated and find old data.
Key functions:
The fused write of SGLang's trtllm_mha backend. Here `plan.build.write_slots`: write and read
addresses of a group are computed from the same pages by one formula, and the pool has only two
writers.
Symptom:
Window layers read keys that were never written there, and keys of other requests are overwritten.
Risk and impact:
Silent corruption across requests, in one combination of three features (FP8, window, this backend).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan import build
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#19107"
TARGET = "lockstep.plan.build:write_slots"
CELLS = ("chunked/window-sinks",)
RELATED = ("sglang-24617", "sglang-24395", "sglang-8622")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def write_slots(
        spec: GroupSpec, work: build.BatchWork, rows: Any, group: tuple[Any, ...]
    ) -> Any:
        full = [entry[0].page_ids for entry in work.pages if entry[0] is not None]
        if spec.window is None or spec.kv_dtype != "float8_e4m3" or not full:
            return old(spec, work, rows, group)
        lens = [len(ids) for ids in full]
        return old(
            spec,
            work,
            rows,
            (np.concatenate(full), build.indptr(lens), np.zeros(len(full), np.int32), group[3]),
        )

    return write_slots
