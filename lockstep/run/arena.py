"""One buffer at a fixed address for the plan of every step.

`load` copies a plan's image into the buffer and returns views of it; where each array lies depends
on the bucket alone. Ids, the emit index and what a backend derives are not in it yet, so a captured
graph could not live on it alone. What does not fit is an error with both numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.plan.image import Views, pack, views
from lockstep.plan.step import StepPlan
from lockstep.types import RuleError


class Arena:
    """Room for an image of `capacity` int32 on a device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=device)

    def load(self, plan: StepPlan) -> tuple[Views, ...]:
        """The plan's arrays on the device, one `Views` per group."""
        image = torch.from_numpy(pack(plan).copy())
        if len(image) > len(self.buffer):
            raise RuleError(
                f"a plan's image has at most {len(self.buffer)} numbers",
                str(len(image)),
                "Schedule less per step, or enlarge the arena",
            )
        place: Tensor = self.buffer[: len(image)]
        place.copy_(image)
        return views(place, plan.bucket, tuple(g.spec for g in plan.groups))
