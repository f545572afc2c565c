"""The draft of a prompt's chunk was given a sampled token where the prompt goes on.

Summary:
A head's row at p is of the token at p + 1. For the last row of a chunk that is the next token of
the prompt; it was given what had been sampled behind the chunk.
Motivation:
Behind a decode step the next token is the sampled one, and the last chunk of a prompt is no other.
Mechanism:
1. A prompt is computed in chunks, and the head extends its keys chunk by chunk.
2. Behind the last row of a chunk stands a token that nobody asked for.
3. One key per chunk is of a wrong token, for as long as the request runs.
Key functions:
EAGLE's draft-extend after chunked prefill in SGLang. Here `spec.model_draft.ModelDraft.observe`
reads `request.tokens`, where the prompt is whole; with the bug the token behind a chunk is another.
Symptom:
Acceptance falls after long prompts. The answers stay right.
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
