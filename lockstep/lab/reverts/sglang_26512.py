"""The cache length already included the new rows, and they were added once more.

Summary:
A fix for "draft-extend does not see its new keys" added the number of new rows to a length that
already included them. The kernel then read past the end, by as many keys as there were new rows.
The fix was reverted soon (#26628).
Motivation:
In that engine the mode decides whether seq_lens means "before the write" or "after the write". In
DRAFT_EXTEND_V2 the worker had increased it before the metadata was built; a test fixture had not,
and made correct code look wrong.
Mechanism:
1. The draft worker sets seq_lens = committed + num_draft_tokens, then asks for metadata.
2. The fix computes cache_seqlens = seq_lens + extend_seq_lens: the new rows are counted twice.
3. Causality is aligned to the end of the cache, so row j sees new_len keys beyond itself, up to
   new_len beyond the last one written.
4. Those slots contain keys of rejected draft tokens, keys of another request, or nothing.
Key functions:
init_forward_metadata and init_forward_metadata_replay_cuda_graph of the FlashAttention backend. In
Lockstep `kv_lens` always means after the write, and `plan.check` compares it with the positions.
Causal rows do not even read it: they see up to their own position. The revert therefore changes
`hi` in the `Table` that `attention.cpu.Backend.bind` makes, which is where extents are read, and
clips it at the pages that the request holds.
Symptom:
Rows see the future and unwritten slots: wrong values, and NaN in a poisoned cache. Outputs of short
tests stay plausible.
Risk and impact:
A warning about reports: the text of the upstream revert and its reviewers claim that the reverted
state is the broken one. It was not; #26651 corrected the fixture and found that another backend was
wrong. An engine that follows the text ships the double count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket
from lockstep.types import INT32_MAX, GroupSpec, Layout

SOURCE = "sgl-project/sglang#26512, reverted by #26628"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("draft-extend-fixed/dense",)
RELATED = ("sglang-26651", "sglang-27545", "flashinfer-3871")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Any) -> Any:
        handle = old(self, spec, bucket, views, variant)
        q_indptr, first_pos = np.asarray(views.q_indptr), np.asarray(views.first_pos)
        request = np.repeat(np.arange(bucket.requests), np.diff(q_indptr))
        cached_len = np.asarray(views.positions)[q_indptr[request]]
        if spec.layout is Layout.FRESH or bucket.tail or bucket.width < 2 or not cached_len.all():
            return handle
        held = (np.diff(views.page_indptr) * spec.page_size + first_pos)[request]
        table = handle.table
        seen = np.asarray(table.hi) + np.diff(q_indptr)[request]
        twice = np.minimum(seen, held).astype(np.int32)
        # no lists: everything is read from pages
        pages = table._replace(start=np.full_like(twice, INT32_MAX), hi=twice)
        return replace(handle, table=pages)

    return bind
