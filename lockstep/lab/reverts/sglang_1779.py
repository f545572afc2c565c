"""Padding with a length of zero: NaN upstream, nothing here.

Summary:
Pad requests of a captured step had a key length of 0, so their rows computed 0 / 0.
Motivation:
Zero looks like the natural length of a request that does not exist.
Mechanism:
1. A pad row sees no keys; its sum is 0.
2. Upstream, 0 / 0 gave NaN, which spread through later operations over the whole batch.
Key functions:
SGLang's graph padding for FlashInfer; the fill value became 1. Here `plan.bucket.pad_group`, for
cross attention, where kv_lens decides what rows see.
Symptom:
Upstream: NaN. Here: pad rows are 0 instead of some finite number, and nothing reads them.
Risk and impact:
An equivalent mutant. Self attention cannot even express it: a row sees at least itself, whatever
kv_lens is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.plan.step import Bucket, Ints, PagedGroup, ints

SOURCE = "sgl-project/sglang#1779"
TARGET = "lockstep.plan.bucket:pad_group"
CELLS = ("encode-decode/cross",)
RELATED = ("sglang-27343", "trtllm-6136")
EQUIVALENT = (
    "By definition a row that sees nothing has output 0 and LSE -inf, both written, neither NaN; "
    "the kernel divides only where the sum is "
    "not 0. Pad rows come after the real ones, no real row has a pad row's key in its range, and "
    "results are cut to the real rows. So real "
    "rows keep their bits, and pad rows stay finite."
)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def pad_group(group: PagedGroup, g: int, bucket: Bucket, pads: Ints, positions: Ints) -> Any:
        padded = old(group, g, bucket, pads, positions)
        lens = padded.kv_lens.copy()
        lens[len(group.kv_lens) :] *= group.spec.causal
        return replace(padded, kv_lens=ints(lens))

    return pad_group
