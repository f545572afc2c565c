"""The attention of the second device: bfloat16 rows, one at a time, float64 inside.

Addresses, windows and lists are the reference's. A row's keys are read in the order of their
positions whatever is beside it, so its bits are promised. Registered as the entry point `rowwise =
"rowwise_attention:Backend"` of `lockstep.backends`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lockstep.attention import reference
from lockstep.attention.base import INVARIANCES
from lockstep.kv.pool import Keys
from lockstep.types import AttnSpec


class Backend(reference.Backend):
    """The reference, rounded once to the dtype of the queries."""

    caps = replace(
        reference.CAPS,
        devices=frozenset({"cpu"}),
        activation_dtypes=frozenset({"bfloat16"}),
        order="canonical",
        invariances=INVARIANCES,
    )

    def attend(self, q: Tensor, keys: Keys, handle: Any, spec: AttnSpec) -> tuple[Tensor, Tensor]:
        out, lse = super().attend(q, keys, handle, spec)
        return out.to(q.dtype), lse
