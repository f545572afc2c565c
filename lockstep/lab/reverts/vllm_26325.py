"""Sinks were lost when requests shared a prefix.

Summary:
When several requests share a prefix, vLLM may attend to it once for all of them (cascade). The
attention sinks were not passed to that path.
Motivation:
An optimisation that replaces a call has to pass on every argument of it (known from the issue).
Mechanism:
1. The scheduler finds a common prefix that is long enough and turns cascade on.
2. The cascade call has no sinks: the denominator lacks one term per head.
3. All weights of the row are too large.
Key functions:
The cascade branch of vLLM's FlashAttention backend. Here `attention.cpu.Backend.bind` for plans in
which two requests hold the same page; the lab's fork recipe makes such plans.
Symptom:
gpt-oss answers degrade under load, when requests happen to share a prefix; a request alone is
right.
Risk and impact:
Silent, and dependent on other users' prompts, so it cannot be reproduced with one request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket
from lockstep.types import GroupSpec, Layout

SOURCE = "vllm-project/vllm#26325"
TARGET = "lockstep.attention.cpu:Backend.bind"
BACKEND = "cpu"
CELLS = ("fork/sinks",)
RELATED = ("flashinfer-4525",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Any, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Any) -> Any:
        handle = old(self, spec, bucket, views, variant)
        ids = np.asarray(views.page_ids)[np.asarray(views.page_ids) > 0]
        if spec.layout is Layout.FRESH or len(np.unique(ids)) == len(ids):
            return handle
        layers = {attn: constants.clone() for attn, constants in handle.layers.items()}
        for constants in layers.values():
            constants[3:] = -torch.inf
        return replace(handle, layers=layers)

    return bind
