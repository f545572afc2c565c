"""Window layers were read with the page ids of the full layers.

Summary:
The kernel of deterministic mode reads prefix and new keys from the pool in one pass. For window
layers the new half was addressed with full-pool ids.
Motivation:
Deterministic mode replaces the extend kernel. The other kernel takes new keys as tensors and needs
no addresses for them, so there was nothing to translate before.
Mechanism:
1. The unified kernel gets one index list: prefix entries, then new entries.
2. Prefix entries were translated to the window pool; new entries were not.
3. New keys are read from slots of the window pool that belong to other tokens.
Key functions:
SGLang's unified Triton extend for SWAKVPool. Here `attention.base.addresses`, which takes a group's
table from that group's own arrays.
Symptom:
Wrong extend steps, in deterministic mode only.
Risk and impact:
Silent, and in the mode that users enable to trust their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.plan.image import PlanArrays
from lockstep.types import GroupSpec

SOURCE = "sgl-project/sglang#24395"
TARGET = "lockstep.attention.base:addresses"
CELLS = ("chunked/window-sinks",)
RELATED = ("sglang-24617", "sglang-19107", "sglang-8685")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    full: list[Any] = []  # the table of the step's first group

    def addresses(spec: GroupSpec, views: PlanArrays) -> Any:
        *table, size = old(spec, views)
        if spec.window is None:
            full[:] = table
        return *(full or table), size

    return addresses
