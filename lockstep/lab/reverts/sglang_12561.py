"""Draft tokens were accepted by uninitialised probabilities.

Summary:
Rejection sampling compares the target's probability with the draft's. Where the draft had none, the
tensor was allocated but not filled, so the decision depended on the previous contents of that
memory.
Motivation:
torch.empty is faster than zeros, and in tests the memory happens to be zero.
Mechanism:
1. A verify step takes draft probabilities; a draft without any passes an empty tensor.
2. The acceptance test reads whatever the memory contains.
3. Draft tokens are accepted although the target did not sample them.
Key functions:
SGLang's sampling verify. Here `spec.verify.accepted_path` compares tokens and uses no
probabilities; with the bug it takes the first child, whatever was sampled.
Symptom:
Repetition and wrong tokens: the answer is only as good as the draft.
Risk and impact:
It depends on memory contents: not reproducible, and worse under load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#12561"
TARGET = "lockstep.spec.verify:accepted_path"
CELLS = ("engine-ngram/llama", "engine-draft/llama")
RELATED = ("sglang-7207",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def accepted_path(draft: Any, sampled: Any) -> tuple[int, ...]:
        children = {parent: node for node, parent in reversed(list(enumerate(draft.parents)))}
        nodes = [0]
        while nodes[-1] in children:
            nodes.append(children[nodes[-1]])
        return tuple(nodes)

    return accepted_path
