"""Without max_tokens an answer ended after a handful of tokens.

Summary:
max_tokens=None means as many tokens as the context leaves. It was replaced by the default of the
parameter.
Motivation:
`or` reads as "if nothing was given", and there is a default at hand.
Mechanism:
1. A request says max_tokens=None.
2. None is replaced by the class's default, 16.
3. The answer ends there, with the reason "length".
Key functions:
`SamplingParams.max_new_len`, which takes the room that the context leaves.
Symptom:
Every open-ended answer is cut, and its finish reason looks right.
Risk and impact:
Cut answers look finished. Where the context leaves less than the default, valid requests are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a default in place of the requested value"
TARGET = "lockstep.sample.params:SamplingParams.max_new_len"
CELLS = ("engine-end/llama", "engine-end/deepseek-v3")
RELATED = ("lockstep-late-stop",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def max_new_len(self: Any, room: int) -> int:
        return int(self.max_tokens or 16)

    return max_new_len
