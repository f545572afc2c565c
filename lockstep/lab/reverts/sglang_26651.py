"""New rows were attended to twice: once as prefix, once as themselves.

Summary:
Triton's draft-extend under CUDA graphs built the prefix part from lengths that already counted the
new rows, and passed the new keys
separately as well.
Motivation:
The kernel takes "prefix from the cache" and "new keys" as two inputs. seq_lens means
after-the-write in this mode, before-the-write in
others. The error was found while correcting the fixture behind #26512, which had blamed other
backends.
Mechanism:
1. kv_indptr is built from seq_lens = prefix + new.
2. The prefix part is not masked, so every row sees all new keys through it, later ones too.
3. The new part adds the keys up to the row itself a second time.
Key functions:
The draft-extend branch of SGLang's Triton metadata for graph replay. Here
`attention.cpu.Backend.lower`: keys are named by position,
each once, so the revert has to name the new ones again in lists behind the end.
Symptom:
Weights of recent tokens too high, future drafts visible; draft acceptance falls.
Risk and impact:
Speculation still returns valid text, it only gets slower: nobody looks. In a target model it would
be a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.kernels.cpu.attend import Rows
from lockstep.plan.build import indptr
from lockstep.plan.image import Views
from lockstep.plan.step import Group, PagedGroup, StepPlan

SOURCE = "sgl-project/sglang#26651"
TARGET = "lockstep.attention.cpu:Backend.lower"
CELLS = ("draft-extend-fixed/dense",)
RELATED = ("sglang-26512", "sglang-27545")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def lower(self: Any, plan: StepPlan, group: Group, views: Views) -> Any:
        handle = old(self, plan, group, views)
        first = plan.q_indptr[plan.request]
        if (
            not isinstance(group, PagedGroup)
            or plan.bucket.tail
            or not len(first)
            or not plan.positions[first].all()
        ):
            return handle
        nth = np.arange(1, len(first) + 1, dtype=np.int32) - first
        again = np.concatenate([group.write_slots[begin : t + 1] for t, begin in enumerate(first)])
        prefix = group.kv_lens[plan.request]  # after the write
        table = handle.table._replace(start=prefix, tail_indptr=indptr(nth), tail_slots=again)
        return replace(handle, table=table, rows=Rows(handle.rows.lo, prefix + nth))

    return lower
