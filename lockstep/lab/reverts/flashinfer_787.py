"""The softmax scale lacked log2(e).

Summary:
A kernel that computes exp2 instead of exp needs its scale multiplied by log2(e). The MLA decode
kernel lacked this factor.
Motivation:
exp2 is what the hardware provides. The factor is usually folded into the scale on the host, once
per kernel family; one family was forgotten.
Mechanism:
1. The kernel computes 2 ** (scale * score).
2. Without the factor this is exp(scale * ln 2 * score): a softmax at a higher temperature.
Key functions:
FlashInfer's MLA decode. Here `attention.base.score_constants`, which multiplies in the factor on
the host for every backend that works in base 2.
Symptom:
Attention is flatter than it should be, everywhere.
Risk and impact:
Silent, but large: any comparison with a reference finds it, so the new kernel had no such test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.order import LOG2E
from lockstep.types import AttnSpec

SOURCE = "flashinfer-ai/flashinfer#787"
TARGET = "lockstep.attention.base:score_constants"
CELLS = ("chunked/latent",)
RELATED = ("vllm-52796", "sglang-33915")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def score_constants(spec: AttnSpec) -> Any:
        pre, c = old(spec)
        return pre, c / LOG2E

    return score_constants
