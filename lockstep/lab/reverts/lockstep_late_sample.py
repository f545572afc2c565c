"""A row took another request's sample for its own.

Summary:
A row that is launched before its token is known names the token by its index among the samples of
the previous step. The index was counted per request, not per step.
Motivation:
With one request, and after every prompt that is computed alone, both indices are 0.
Mechanism:
1. A step samples tokens for several requests.
2. The next step is launched before the first is settled; the token ids of its rows are taken from
   the samples.
3. All rows that follow a prompt take the first sample.
Key functions:
`sched.request.Request.launch`, which gives a token its index.
Symptom:
The key of the second token belongs to another request's token: the text continues in another
direction.
Risk and impact:
One user's words enter another user's context. The tokens themselves look right, because the host
settles the right values; only rows launched in between are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a sample taken from the wrong row of the step before"
TARGET = "lockstep.sched.request:Request.launch"
CELLS = ("engine-late/llama", "engine-late/qwen3")
RELATED = ("lockstep-late-order", "vllm-10863")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def launch(self: Any, rows: Any, sample: int, step: int) -> None:
        old(self, rows, 0, step)

    return launch
