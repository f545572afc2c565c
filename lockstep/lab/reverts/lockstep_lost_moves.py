"""Keys were moved when a launch was prepared, and a replay prepares nothing.

Summary:
Moves belong to a step. They were carried out beside the launch, where a recorder does not see them.
Motivation:
Lowering had the step's metadata at hand, so it also did the moves.
Mechanism:
1. A launch that moves keys is recorded; the moves themselves happen outside the recorded part.
2. A later step of the bucket has other moves.
3. The replay moves nothing: the fork reads a page that was never filled.
Key functions:
`run.step.Step.relocate`, a part of the launch.
Symptom:
Forked requests read what their pages contained before: NaN in the lab.
Risk and impact:
Silent where the pages contain old keys, possibly of another user.
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
