"""Log-probabilities were taken from the first rows instead of the accepted ones.

Summary:
The tokens of a tree's accepted path are those of its nodes. Their log-probabilities were taken from
the same number of rows, counted from the root.
Motivation:
In a chain the accepted nodes are the first rows, and the code was written for chains.
Mechanism:
1. A tree is verified; nodes 0, 2 and 5 are accepted.
2. Three tokens are returned with the log-probabilities of rows 0, 1 and 2.
3. The tokens are right; two of their log-probabilities belong to other rows.
Key functions:
`llm.accept.gather_logprobs`, which takes the rows that the tokens were sampled from.
Symptom:
Log-probabilities of rejected draft tokens next to accepted tokens.
Risk and impact:
No test of tokens or text sees it; training that uses log-probabilities learns from noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: values reported for an accepted path"
TARGET = "lockstep.llm.accept:gather_logprobs"
CELLS = ("engine-tree/llama",)
RELATED = ("sglang-7239",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(launched: Any, chosen: Any, verified: Any) -> Any:
        first = {row: tuple(range(len(nodes))) for row, nodes in verified.nodes.items()}
        return old(launched, chosen, verified._replace(nodes=first))

    return gathered
