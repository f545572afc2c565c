"""A token was sampled at the end of a chunk instead of the end of the prompt.

Summary:
A prompt is computed in chunks. The logits of every chunk's last row were sampled from, like those
of the prompt's last row.
Motivation:
The step emits one row per request, and for most requests that row is to be sampled.
Mechanism:
1. The first chunk ends in the middle of the prompt.
2. A token is sampled from its last row and kept as if the answer had started.
3. The next chunk continues the prompt; the sampled token is placed after it.
Key functions:
Chunked prefill with EAGLE in SGLang, where the tail token of a chunk was a sampled one instead of
the next prompt token. Here `sched.request.Request.samples`, which returns 0 before the prompt's
last row.
Symptom:
The answer starts with unrelated tokens. Upstream only the draft model saw them: the acceptance rate
fell.
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
