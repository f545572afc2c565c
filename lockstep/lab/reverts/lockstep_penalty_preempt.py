"""After a preemption the generated tokens counted as prompt.

Summary:
A preempted request is computed again from its prompt and its generated tokens. Penalties then
treated all of them as the prompt.
Motivation:
Recomputation is a prefill, and the input of a prefill is called the prompt.
Mechanism:
1. A request with a frequency penalty generates some tokens and loses its pages.
2. It is computed again as one long prefill.
3. The row at its end is sampled as if nothing had been generated: no token is penalised, and
   min_tokens starts again.
Key functions:
`llm.engine.Engine._row_batch`, which sets the number of prompt tokens. Engines that fold generated
tokens into the prompt on preemption have had this bug.
Symptom:
One token after every preemption is chosen by other rules; from there on the answer differs.
Risk and impact:
It depends on load alone: the same request run by itself is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

SOURCE = "class: penalties after recomputation"
TARGET = "lockstep.llm.engine:Engine._row_batch"
CELLS = ("engine-preempt/llama",)
RELATED = ("lockstep-preempt-token", "sglang-16521")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _row_batch(self: Any, step: Any, rows: Any) -> Any:
        batch = old(self, step, rows)
        again = (rows.draws.last_lens > 1) & (batch.positions > batch.how.prompt_lens)
        prompt_lens = np.where(again, batch.positions, batch.how.prompt_lens)
        return batch._replace(how=replace(batch.how, prompt_lens=prompt_lens))

    return _row_batch
