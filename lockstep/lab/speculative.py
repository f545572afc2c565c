"""Speculation under the lab: drafts that are the target with noise on its weights, so that they
are right sometimes and wrong sometimes, and the options of the ways to draft.

Knows tiny models; the engine's recipes, the fuzzer and tests use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lockstep.lab.options import CPU, Device
from lockstep.lab.tiny import EOS, Tiny, assembled, loaded
from lockstep.models.loader import Loaded
from lockstep.spec import draft_model
from lockstep.spec.draft import DraftModel, DraftSetup

NOISE = 0.05  # of a weight's size, on every weight of a draft
NGRAM: dict[str, Any] = {"speculative_algorithm": "ngram", "speculative_num_steps": 4}
CHAIN: dict[str, Any] = {
    "speculative_algorithm": "draft",
    "speculative_draft_model": "the target with noise",
    "speculative_num_steps": 3,
}
TREE: dict[str, Any] = {**CHAIN, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 9}


@lru_cache(maxsize=16)
def noisy(tiny: Tiny, scale: float = NOISE, device: Device = CPU, seed: int = 17) -> Loaded:
    """The model with noise on its weights, `scale` times as large as they are."""
    tensors: dict[str, Tensor] = {}
    loaded(tiny, device, tensors)
    generator = torch.Generator().manual_seed(seed)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        weight = tensors[name].float()
        noise = torch.randn(shape, generator=generator)
        worse = weight + scale * weight.std(correction=0) * noise
        return worse.to(device.compute).float().to(device.place)

    return assembled(tiny.stated, take, (EOS,), device)


def drafts(tiny: Tiny, device: Device = CPU) -> Callable[[DraftSetup], DraftModel]:
    """How an engine of a tiny model loads its draft."""
    return lambda setup: draft_model.of(noisy(tiny, device=device), setup)
