"""Every replay embedded the tokens of the recorded step.

Summary:
Token ids were a tensor of their own beside the plan. A captured launch embeds the tensor that it
was captured with.
Motivation:
Token ids are not attention metadata, so they were not in the replay buffers.
Mechanism:
1. A decode step is recorded with the tokens of its requests.
2. The next step has other tokens and the same bucket.
3. The replay computes rows of the old tokens at the new positions.
Key functions:
`run.runner.inputs`: ids are in the arena, with everything else that a launch reads.
Symptom:
Every replayed step continues from the tokens of the recorded step.
Risk and impact:
Every answer is wrong; the first replay test finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.lab.reverts import copied_once

SOURCE = "class: an input outside of the recorded buffers"
TARGET = "lockstep.run.runner:inputs"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
RELATED = ("lockstep-frozen-slots", "lockstep-pad-tokens")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def inputs(rows: Any) -> Any:
        ids, positions = old(rows)
        return copied_once(ids), positions

    return inputs
