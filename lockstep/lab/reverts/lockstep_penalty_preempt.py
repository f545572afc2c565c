"""After a preemption the answer so far counted as prompt.

Summary:
A preempted request is computed again from its prompt and the tokens it had generated. Penalties
then took all of them for the prompt.
Motivation:
Recomputation is a prefill, and what a prefill is given is called the prompt.
Mechanism:
1. A request with a frequency penalty generates some tokens and loses its pages.
2. It comes back as one long prefill.
3. The row at its end is sampled as if nothing had been generated: no token is penalised, min_tokens
   starts again.
Key functions:
`llm.engine.Engine._row`, which says how many tokens are the prompt. Engines that fold generated
tokens into the prompt on preemption have
had this.
Symptom:
One token after every preemption is chosen by other rules; from there on the answer is another one.
Risk and impact:
Depends on load alone: the same request alone is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: penalties after recomputation"
TARGET = "lockstep.llm.engine:Engine._row"
CELLS = ("engine-preempt/llama",)
RELATED = ("lockstep-preempt-token", "sglang-16521")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _row(self: Any, completion: Any, piece: Any) -> Any:
        row = old(self, completion, piece)
        again = piece.new_len > 1 and row.generated_len > 0
        return row._replace(prompt_len=row.position) if again else row

    return _row
