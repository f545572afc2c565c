"""New rows were attended to twice: once as prefix, once as themselves.

Summary:
Under CUDA graphs, Triton's draft-extend built the prefix part from lengths that already included
the new rows, and passed the new keys separately as well.
Motivation:
The kernel takes "prefix from the cache" and "new keys" as two inputs. seq_lens means
after-the-write in this mode and before-the-write in other modes. The error was found while
correcting the fixture behind #26512, which had blamed other backends.
Mechanism:
1. kv_indptr is built from seq_lens = prefix + new.
2. The prefix part is not masked, so through it every row sees all new keys, including later ones.
3. The new part adds the keys up to the row itself a second time.
Key functions:
The draft-extend branch of SGLang's Triton metadata for graph replay. Here
`attention.cpu.Backend.bind`: keys are addressed by position, each once, so the revert has to list
the new keys again after the end.
Symptom:
The weights of recent tokens are too high, and later draft tokens are visible; the acceptance rate
falls.
Risk and impact:
Speculation still returns valid text and only gets slower, so it goes unnoticed. In a target model
it would be a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.plan.build import indptr
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket
from lockstep.types import GroupSpec, Layout

SOURCE = "sgl-project/sglang#26651"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("draft-extend-fixed/dense",)
RELATED = ("sglang-26512", "sglang-27545")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Any) -> Any:
        handle = old(self, spec, bucket, views, variant)
        q_indptr, slots = np.asarray(views.q_indptr), np.asarray(views.write_slots)
        request = np.repeat(np.arange(bucket.requests), np.diff(q_indptr))
        first = q_indptr[request]
        if (
            spec.layout is Layout.FRESH
            or bucket.tail
            or not len(first)
            or not np.asarray(views.positions)[first].all()
        ):
            return handle
        nth = np.arange(1, len(first) + 1, dtype=np.int32) - first
        again = np.concatenate([slots[begin : t + 1] for t, begin in enumerate(first)])
        prefix = np.asarray(views.kv_lens)[request]  # after the write
        listed = handle.table._replace(
            start=prefix,
            tail_indptr=indptr(nth),
            tail_slots=again,
            hi=(prefix + nth).astype(np.int32),
        )
        return replace(handle, table=listed)

    return bind
