"""An LSE in base 2 was merged as if it were natural.

Summary:
Two partial attentions are merged by their log-sum-exps. One library returns them in base 2; the
merge expected base e.
Motivation:
Both are called "the LSE", with the same shape and a similar size. Each library documents its own
base, or does not.
Mechanism:
1. New keys and cached keys are attended to separately (MLA with a prefix hit).
2. FlashInfer's LSE is log2 of the sum; the merge computes exp(a - b).
3. The parts are weighted by a power of the right ratio; the error is largest with a prefix much
   longer than the suffix.
Key functions:
vLLM's merge of chunked context (known from the issue; SGLang has the same pattern in two places).
Here the last line of the CPU's `run_unit`, the one place where base 2 is converted to natural; the
revert undoes it after the call.
Symptom:
Warm runs differ from cold ones. Where nothing is merged, only a check of the LSE itself shows it:
this revert breaks that property alone.
Risk and impact:
Silent; the error grows with the prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.order import LN2

SOURCE = "vllm-project/vllm#52796"
TARGET = "lockstep.attention.cpu:call"
BACKEND = "cpu"
CELLS = ("chunked/latent",)
RELATED = ("flashinfer-787", "vllm-flash-attention-87")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        work: Any, q: Any, k: Any, v: Any, out: Any, lse: Tensor, handle: Any, layer: Any
    ) -> None:
        old(work, q, k, v, out, lse, handle, layer)
        lse /= LN2

    return call
