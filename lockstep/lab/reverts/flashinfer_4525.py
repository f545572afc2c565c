"""Some heads read the sink of another head.

Summary:
Sinks are loaded in groups of heads. The bound of the load was counted in groups instead of heads.
Motivation:
Head counts that are a multiple of the vector width need no bound at all.
Mechanism:
1. The number of heads is no multiple of the group.
2. The last group is clamped as a whole, or not at all.
3. Its heads read past the end of the array.
Key functions:
FlashInfer's sink load. Here `attention.base.sink_logits2`, one logit per head; the revert fills the
last, partial group of four from the first one, so that no read is out of bounds.
Symptom:
The last heads have a wrong denominator.
Risk and impact:
An out-of-bounds read that usually returns a plausible value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.types import AttnSpec

SOURCE = "flashinfer-ai/flashinfer#4525"
TARGET = "lockstep.attention.base:sink_logits2"
CELLS = ("chunked/sinks",)
RELATED = ("vllm-26325", "flashinfer-1148")

GROUP = 4


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def sink_logits2(spec: AttnSpec, heads: int) -> Any:
        sinks = old(spec, heads)
        return np.resize(sinks[: max(GROUP, heads // GROUP * GROUP)], heads)

    return sink_logits2
