"""The copy to the device was skipped when the shape had not changed.

Summary:
The image of a step is copied to the device before every launch. An optimisation compared only the
header of the image, which decode steps of one bucket share, and skipped the copy when it was equal.
Motivation:
The copy costs a microsecond of host time, and most of the image does not change from one decode
step to the next.
Mechanism:
1. A decode step is copied and launched.
2. The next one has the same bucket and the same counts, hence the same header.
3. The launch computes the previous step once more.
Key functions:
`run.step.Arena.load`, which always copies the whole image.
Symptom:
A request repeats its token until another request arrives or ends.
Risk and impact:
Every answer is wrong, but only in steady decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a buffer that is not refreshed (compare sgl-project/sglang#25015)"
TARGET = "lockstep.run.step:Arena.load"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
RELATED = ("vllm-35175",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, length: int) -> Any:
        head = self._arrays[self._turn][:10].tolist()
        if vars(self).get("last") == (length, head):
            return self.buffer[:length]
        self.last = length, head
        return old(self, length)

    return load
