"""One buffer at a fixed address for the image of every step: all that a launch reads but weights
and cache. `host` is filled first, `load` copies it to the device: one copy per step. On a GPU there
are two places to fill, in turns, and one is filled again only when its copy has run.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.types import RuleError


class Arena:
    """Room for an image of `capacity` int32 on a device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._slots = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(1 + pinned)
        ]
        event: Any = torch.cuda.Event
        self._copied = [event() for _ in self._slots] if pinned else []
        self._arrays = [slot.numpy() for slot in self._slots]
        self._turn = 0
        self._image = self.buffer[:0]  # as it was loaded last

    def host(self, length: int) -> NDArray[np.int32]:
        """Where an image of `length` numbers is written: the next place whose copy has run."""
        if length > len(self.buffer):
            rule = f"a step's image has at most {len(self.buffer)} numbers"
            raise RuleError(rule, str(length), "Schedule less per step, or enlarge the arena")
        self._turn = (self._turn + 1) % len(self._slots)
        if self._copied and not self._copied[self._turn].query():
            self._copied[self._turn].synchronize()
        return self._arrays[self._turn][:length]

    def load(self, length: int) -> Tensor:
        """Copies the image to the device and returns it there."""
        if self._image.shape[0] != length:
            self._image = self.buffer[:length]
        if self._copied:
            self._image.copy_(self._slots[self._turn][:length], non_blocking=True)
            self._copied[self._turn].record()
        else:  # by numpy, on this thread
            self._image.numpy()[:] = self._arrays[self._turn][:length]
        return self._image
