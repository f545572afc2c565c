"""A draft step wrote the list entries of all planned steps into rows sized for the current step.

Summary:
For every branch, EAGLE's draft decode keeps the pages of the draft tokens produced so far. With
pages larger than 1 the list was filled with all planned steps instead of the steps so far,
overflowed its row and overwrote the next one.
Motivation:
With several branches (top-k > 1) every draft step rebuilds such a table, inside buffers that a CUDA
graph has captured. The path for pages of 1 had the cut; the one for larger pages did not.
Mechanism:
1. The slots of a branch arrive num_steps wide, whatever the current step is.
2. The table of step s has decode_length + 1 columns per row, enough for the tokens so far.
3. The scatter writes one column per distinct page of all num_steps slots: with small pages that is
   more than the row has.
4. The surplus is written to the next row, and after the last row to other memory of the graph's
   pool.
Key functions:
FlashAttentionBackend._apply_cuda_graph_metadata and draft_decode_set_expand_metadata. Here
`plan.build.tail_slots`, which fills the lists of tree rows; `plan.build.paths` alone determines
their widths.
Symptom:
NaN logits or an illegal access, much later and elsewhere. In the lab: a branch reads a slot that
its neighbour will use in a later step, still NaN, and writes its own key to the wrong place.
Risk and impact:
Memory corruption without an error, in ordinary setups (top-k 8, pages of 2). The fix cuts the slots
to decode_length and asserts the width. Putting the bug back upstream now triggers that assertion,
not the symptom, so the lab runs every revert with guards and without. (A seed report adds a fix for
empty batches; the merged commit has none.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.plan import build
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#27360"
TARGET = "lockstep.plan.build:tail_slots"
CELLS = ("draft-decode/dense",)
RELATED = ("sglang-27338", "sglang-15469", "sglang-7239")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def tail_slots(spec: GroupSpec, g: int, work: build.BatchWork, rows: Any) -> Any:
        slots, shape = old(spec, g, work, rows), work.shape
        for row in np.flatnonzero(shape.list_lens).tolist():
            i = shape.request[row]
            pages = work.pages[i][g]
            end = shape.tail_indptr[row + 1]  # one column too many: the branch's next token
            if pages is not None and end < len(slots):
                room = len(pages.scratch) * spec.page_size
                future = min(shape.nodes[end - 1] + shape.new_lens[i], room - 1)
                slots[end] = build.node_slots(spec, pages, np.array([future], np.int32))[0]
        return slots

    return tail_slots
