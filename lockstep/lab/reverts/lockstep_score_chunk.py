"""Scores of the second chunk were looked up among the tokens of the first.

Summary:
The row at position p scores prompt token p + 1. The row's index within its step was used instead of
its position.
Motivation:
For a prompt that is computed in one step both are the same.
Mechanism:
1. A prompt with log-probabilities is computed in chunks.
2. In the second chunk, row 0 is at the position where the chunk begins.
3. Its logits are used to score the prompt's second token instead of the next one.
Key functions:
`llm.rows.score`.
Symptom:
Scores are wrong from the second chunk on, and plausible. Short prompts are right.
Risk and impact:
Perplexities of long texts are wrong by a little or a lot, depending on the chunk size, which should
affect speed only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: row indices of a chunk used as positions"
TARGET = "lockstep.llm.rows:score"
CELLS = ("engine-chunk/llama", "engine-score/qwen3")
RELATED = ("lockstep-prompt-scores", "sglang-26329", "vllm-54498")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def score(ops: Any, generation: Any, request: Any, first: int, logits: Any) -> Any:
        return old(ops, generation, request, 1, logits)

    return score
