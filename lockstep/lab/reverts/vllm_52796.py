"""An LSE in base 2 was merged as if it were natural.

Summary:
Two partial attentions are merged by their log-sum-exps. One library returns them in base 2, the
merge expected base e.
Motivation:
Both are "the LSE", of the same shape and a similar size. Each library documents its own, or does
not.
Mechanism:
1. New keys and cached keys are attended to separately (MLA with a prefix hit).
2. FlashInfer's LSE is log2 of the sum; the merge computes exp(a - b).
3. The parts are weighted by a power of the right ratio; with a prefix much longer than the suffix
   the error is largest.
Key functions:
vLLM's merge of chunked context (known from the issue; SGLang has the same pattern in two places).
Here `attention.base.log2_to_ln`, the one
place where a kernel's base 2 becomes natural.
Symptom:
Warm runs differ from cold ones. Where nothing is merged, only a look at the LSE itself shows it:
this revert breaks that property alone.
Risk and impact:
Silent; grows with the prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

SOURCE = "vllm-project/vllm#52796"
TARGET = "lockstep.attention.base:log2_to_ln"
CELLS = ("chunked/latent",)
RELATED = ("flashinfer-787", "vllm-flash-attention-87")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def log2_to_ln(lse2: Tensor) -> Any:
        return lse2

    return log2_to_ln
