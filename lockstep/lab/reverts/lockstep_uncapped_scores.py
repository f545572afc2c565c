"""A model whose scores are capped was built without the cap.

Summary:
Gemma 2 caps attention scores at c tanh(x / c). The number was in the config, in the kernel and in
its tests, and not in the layer.
Motivation:
A cap is optional in every layer and every backend; leaving it out is legal everywhere.
Mechanism:
1. The config states attn_logit_softcapping.
2. The layer is described without it, so its specs say that there is none.
3. Cache, plan, backend and recomputation agree on the wrong scores, bit for bit.
Key functions:
`models.gemma2.describe`.
Symptom:
Slightly wrong text; far off where scores are large, which is where caps are meant to bind.
Risk and impact:
Equalities of bits cannot see it; only a second text of the model, from its config, can.
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
