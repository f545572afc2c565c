"""A uniform number was exactly 1, its noise infinite, and a masked token won.

Summary:
Sampling noise is -ln(-ln u), with u computed from a hash. The largest hashes were rounded to u = 1,
where the noise is +inf.
Motivation:
Multiplying a 32-bit hash by 2^-32 in float32 is the obvious way to a number in [0, 1).
Mechanism:
1. float32 has 24 bits: hashes from 2^32 - 128 on are rounded up to 2^32, and u to 1.
2. -ln 1 is 0, and its logarithm makes the noise +inf. At the other end a hash of 0 makes it -inf.
3. A masked token has the score -inf; with this noise its sum is NaN, or it beats every other token.
Key functions:
The seeded sampler of SGLang (#33423, and #30822 for the coins of speculative sampling). Here
`sample.formulas.gumbel`, for arrays and tensors; u is the midpoint of the hash's interval and exact
in float64. The compiled kernel is loaded before the swap and does not change.
Symptom:
One hash in 2^25 (about 33 million) makes a token appear that top-k had removed. The lab does not
wait for it: it asks for the largest hashes.
Risk and impact:
Grammar constraints and banned tokens are violated at random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lockstep.kernels.cpu import sample

SOURCE = "sgl-project/sglang#33423"
TARGET = "lockstep.sample.formulas:gumbel"
CELLS = ("sample/llama",)
RELATED = ("sglang-7207", "sglang-11096")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    sample.compiled()  # compiled from the right function, and cached

    def gumbel(word: Any) -> Any:
        words = torch.as_tensor(word)
        noise = -(-(words.float() * 2.0**-32).log()).log()
        return noise if isinstance(word, torch.Tensor) else noise.numpy().astype(np.float64)

    return gumbel
