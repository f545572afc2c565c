"""At the end of a chunk the draft head got a sampled token instead of the next prompt token.

Summary:
A draft head's row at p uses the token at p + 1. For the last row of a chunk that is the next token
of the prompt; it got the token sampled after the chunk instead.
Motivation:
After a decode step the next token is the sampled one, and so it is after the last chunk of a
prompt.
Mechanism:
1. A prompt is computed in chunks, and the head extends its keys chunk by chunk.
2. After the last row of a chunk, a sampled token takes the place of the prompt token.
3. One key per chunk is computed from a wrong token and stays until the request ends.
Key functions:
EAGLE's draft-extend after chunked prefill in SGLang. Here `spec.model_draft.ModelDraft.observe`
reads `request.tokens`, which contains the whole prompt; the revert changes the token after each
chunk.
Symptom:
The acceptance rate falls after long prompts. The answers stay right.
Risk and impact:
A silent loss of speed that grows with the prompt; no test of answers can see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#26800"
TARGET = "lockstep.spec.model_draft:ModelDraft.observe"
CELLS = ("engine-head/llama",)
RELATED = ("sglang-26329", "sglang-10846")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def observe(self: Any, settled: Any) -> None:
        kept: list[tuple[list[int], int, int]] = []
        for request, begin, rows in settled.rows:
            for p in {begin, begin + len(rows)}:
                if 0 < p < len(request.spec.prompt):
                    kept.append((request.tokens, p, request.tokens[p]))
                    request.tokens[p] = 1
        try:
            old(self, settled)
        finally:
            for tokens, p, token in kept:
                tokens[p] = token

    return observe
