"""A row took another request's sample for its own.

Summary:
A row that is launched before its token is known names it by its number among the samples of the
step before. The numbers were counted per request, not per step.

Motivation:
With one request, and after every prompt that is computed alone, both numbers are 0.

Mechanism:
1. A step samples tokens for several requests.
2. The next one is launched before it is settled; the ids of its rows are taken from the samples.
3. All rows that follow a prompt take the first sample.

Key functions:
`sched.request.Request.launch`, which gives a token its number.

Symptom:
The key of the second token is another request's: the text goes on, and goes elsewhere.

Risk and impact:
One user's words in another's context. Tokens that are settled later look right, for the host has
the right values: only the rows that were launched in between are wrong.
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
