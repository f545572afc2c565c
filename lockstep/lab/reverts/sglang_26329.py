"""A token was sampled where a chunk ended, not where the prompt did.

Summary:
A prompt is computed in chunks. Every chunk has a last row, and its logits were sampled from like
those of the prompt's last row.
Motivation:
The step emits one row per request; for most requests that row is the one to sample.
Mechanism:
1. The first chunk ends in the middle of the prompt.
2. A token is sampled from its last row and kept as if the answer had begun.
3. The next chunk goes on with the prompt; the sampled token stands after it.
Key functions:
Chunked prefill with EAGLE in SGLang, where the tail token of a chunk was a sampled one instead of
the next prompt token. Here
`sched.request.Request.samples`: none before the last row.
Symptom:
The answer starts with tokens that have nothing to do with it. Upstream only the draft model saw
them: acceptance fell.
Risk and impact:
Wrong for every prompt longer than a chunk, right for all others: tests with short prompts pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "sgl-project/sglang#26329"
TARGET = "lockstep.sched.request:Request.samples"
CELLS = ("engine-chunk/llama",)
RELATED = ("lockstep-score-chunk", "vllm-41838")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def samples(self: Any, new_len: int) -> Any:
        return max(old(self, new_len), min(1, self.spec.max_new_tokens))

    return samples
