"""Scored items came back without their tokens.

Summary:
An item's tokens are given, not generated. The completion that reports its scores had no tokens.
Motivation:
Completions collect the tokens that were sampled, and items sample none.
Mechanism:
1. Items are scored after a prompt, one completion each.
2. Nothing is sampled, so nothing is appended.
3. token_ids is empty, next to one log-probability per token of the item.
Key functions:
`llm.generation.CompletionState.to_completion`, which makes the immutable result of a completion.
Symptom:
Log-probabilities that belong to no token.
Risk and impact:
A client that pairs tokens with scores gets nothing, or pairs them with another item's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.llm.engine import ITEM

SOURCE = "class: fields that one kind of request does not fill"
TARGET = "lockstep.llm.generation:CompletionState.to_completion"
CELLS = ("engine-score/llama", "engine-encoder/bart")
RELATED = ("lockstep-item-bos",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def completion(self: Any, finish: str | None) -> Any:
        done = old(self, finish)
        return (
            replace(done, token_ids=())
            if self.params is ITEM or replace(self.params, sample_index=0) == ITEM
            else done
        )

    return completion
