"""Equally likely tokens were listed as the best in arbitrary order.

Summary:
`top_logprobs` lists the k best tokens, and equal ones by the smaller id. `topk` over the logits
returns equal tokens in no defined order.
Motivation:
`topk` is the library's function for this, and logits of a trained model are hardly ever equal.
Mechanism:
1. Logits are equal: a head in a narrow format, tokens that were never trained, a soft cap that
   binds.
2. The algorithm of `topk` decides their order and, at the edge of the list, which of them are
   listed.
3. That depends on the library, the size of the vocabulary and the device.
Key functions:
`sample.sampler.log_probs`.
Symptom:
Lists of best tokens differ between machines whose log-probabilities agree in all bits.
Risk and impact:
The engine and its recomputation share this code, so they agree with each other; only an independent
implementation shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

SOURCE = "class: ties in the order of an unstable sort"
TARGET = "lockstep.sample.sampler:log_probs"
CELLS = ("sample/llama",)
RELATED = ("lockstep-expert-ties", "lockstep-noisy-tie")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def log_probs(ops: Any, logits: Tensor, token_ids: Tensor, k: int = 0) -> Any:
        told = old(ops, logits, token_ids, k)
        found = [old(ops, logits, logits.topk(k, 1).indices[:, j]) for j in range(k)]
        for j, each in enumerate(found):
            told.top_ids[:, j], told.top[:, j] = logits.topk(k, 1).indices[:, j], each.chosen
        return told

    return log_probs
