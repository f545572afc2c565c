"""One random number was used for two decisions.

Summary:
The random numbers that had decided earlier tokens were used again for a later one.
Motivation:
The numbers are already in a tensor, one per row, and look as random as new ones.
Mechanism:
1. A coin is drawn for a row and used for its decision.
2. The next decision of the same request uses the same coin.
3. Each decision alone has the right distribution, but together they are correlated: a token that
   was lucky once is lucky again.
Key functions:
Speculative sampling in SGLang, where the accept coins also chose the final token (inferred from the
fix, which adds a second tensor). Here `sample.formulas.counter`: noise is keyed by seed, completion
and position; the revert leaves the position out.
Symptom:
Repetition. The frequencies of tokens over positions are far from their probabilities.
Risk and impact:
Biased answers that look like a bad model. A chi-square test over positions finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#7207"
TARGET = "lockstep.sample.formulas:counter"
CELLS = ("sample/llama", "engine-batch/llama")
RELATED = ("lockstep-sample-index", "sglang-11096", "sglang-33423")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def counter(seed: int, index: Any, position: Any) -> Any:
        return old(seed, index, position * 0)

    return counter
