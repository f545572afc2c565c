"""The last entries of a padded buffer were taken instead of the first.

Summary:
A buffer has room for the largest batch and its real entries are first. A slice [-n:] took its end.
Motivation:
With a full bucket both slices are the same.
Mechanism:
1. Three requests run in a bucket of four.
2. The result has four entries; the last three are those of requests 1 and 2 and of the pad.
3. Requests 0 and 1 get the entries of requests 1 and 2, and request 2 gets the pad's.
Key functions:
State tracking of Mamba layers in SGLang, which saved a state to a stale slot. Here
`run.runner.StepOutput.without_pads`.
Symptom:
Wrong answers whenever a bucket is not full.
Risk and impact:
One request's answer is another's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#32555"
TARGET = "lockstep.run.runner:StepOutput.without_pads"
CELLS = ("engine-replay/llama", "engine-pad/llama")
RELATED = ("lockstep-pad-tokens", "sglang-27343")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def without_pads(self: Any, real: Any) -> Any:
        wrong = self.emitted[len(self.emitted) - real.emits :]
        return old(self._replace(emitted=wrong), real)

    return without_pads
