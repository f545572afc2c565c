"""A model with a soft cap on attention scores was built without the cap.

Summary:
Gemma 2 caps attention scores at c tanh(x / c). The cap was in the config, in the kernel and in the
kernel's tests, but not in the layer.
Motivation:
The cap is optional in every layer and every backend, so omitting it is legal everywhere.
Mechanism:
1. The config has attn_logit_softcapping.
2. The layer is described without it, so its specs have no cap.
3. Cache, plan, backend and recomputation agree on the wrong scores, bit for bit.
Key functions:
`models.gemma2.describe`.
Symptom:
Slightly wrong text; far off where scores are large, which is where the cap should bind.
Risk and impact:
Comparisons of bits cannot see it; only a second implementation of the model, made from its config,
can.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

SOURCE = "sgl-project/sglang#34093 (class: an option that is dropped on the way to the kernel)"
TARGET = "lockstep.models.gemma2:describe"
CELLS = ("engine-batch/gemma2", "engine-pad/gemma2")
RELATED = ("sglang-33915", "lockstep-top-ties")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def describe(config: Any) -> Any:
        return old(SimpleNamespace(**{**vars(config), "attn_logit_softcapping": None}))

    return describe
