"""Keys were moved when a launch was prepared, and a replay prepares nothing.

Summary:
Moves belong to a step. They were carried out beside the launch, where a recorder does not see them.
Motivation:
It was the place where the step's metadata was at hand: lowering did it.
Mechanism:
1. A launch that moves keys is recorded; the moves themselves happen outside of what is recorded.
2. A later step of the bucket moves other keys.
3. The replay moves nothing: the fork reads a page that was never filled.
Key functions:
`run.step.Step.relocate`, a part of the launch.
Symptom:
Forked requests read what their pages held before: in the lab NaN.
Risk and impact:
Silent where the pages hold old keys; other people's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SOURCE = "house rule: lowering touches no cache"
TARGET = "lockstep.kv.pool:KvWriter.relocate"
CELLS = ("engine-replay/llama",)
RELATED = ("lockstep-frozen-slots", "llamacpp-14742")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def relocate(self: Any) -> None:
        for source, target in self.views.moves.numpy().tolist():
            for layer in self.pool.storages:
                for storage in layer:
                    rows = storage.view(torch.uint8).numpy()
                    rows[target] = rows[source]

    return relocate
