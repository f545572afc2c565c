"""The index of emitted rows was a per-step copy outside the captured buffers.

Summary:
Eager code indexes with int64; a graph's buffers are int32. Where both meet, one side converts, and
the result is a tensor of that step.
Motivation:
torch once required int64; the conversion on the host stayed.
Mechanism:
1. The recorded step emits the last row of every request.
2. In a later step of the bucket the requests have other lengths.
3. The replay emits the rows of the recorded step.
Key functions:
FlashInfer MLA under graphs in SGLang. Here `run.runner.take_emitted`, which indexes with the
arena's own numbers.
Symptom:
The next token is chosen by the logits of another row, or of a pad row.
Risk and impact:
Only in buckets of ragged steps; decode steps emit every row and look right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.lab.reverts import copied_once

SOURCE = "sgl-project/sglang#27840"
TARGET = "lockstep.run.runner:take_emitted"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
RELATED = ("lockstep-frozen-slots", "sglang-32555")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def emitted(ops: Any, hidden: Any, rows: Any) -> Any:
        return hidden[copied_once(rows.emit).long()]

    return emitted
