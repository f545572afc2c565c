"""One random number decided several samples.

Summary:
The random number that decided whether a draft token is accepted was used again for the sample after
it.
Motivation:
A verify step needs several random numbers per request, and there was one tensor of them.
Mechanism:
1. A draft is verified; every node is sampled.
2. All nodes of a request draw with the noise of the first node's position.
3. Tokens after the first differ from those that plain decoding would have drawn.
Key functions:
SGLang's verify kernels, which later got a separate tensor of coins for the last sample. Here
`llm.rows.Draws.positions`: noise is a function of the position that a token will have.
Symptom:
Biased samples at any temperature above 0; greedy decoding is right.
Risk and impact:
No crash and no bad text: only a comparison with plain decoding shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: all nodes of a draft share one noise value"
TARGET = "lockstep.llm.rows:Draws.positions"
CELLS = ("engine-draft/llama", "engine-tree/llama")
RELATED = ("lockstep-tree-depth", "sglang-7207")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def positions(self: Any, cached_lens: Any) -> Any:
        found = old(self, cached_lens)
        first = {owner: row for row, owner in reversed(list(enumerate(self.owners.tolist())))}
        return found[[first[owner] for owner in self.owners.tolist()]]

    return positions
