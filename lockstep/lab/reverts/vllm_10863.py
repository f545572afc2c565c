"""Seeded and unseeded rows were sampled separately and returned in the wrong order.

Summary:
A batch had rows with their own seed and rows without. The two kinds were sampled one after the
other, and the results of one kind did not return to their rows.
Motivation:
Seeded rows need a generator each; the others can be drawn in one call.
Mechanism:
1. The rows are sorted by kind.
2. Each kind is sampled.
3. The results are written in the sorted order, not in that of the batch.
Key functions:
Rejection sampling in vLLM with mixed seeds. Here `sample.sampler.settings`, which lays out the
parameters of every row; the revert puts the sampled rows before the greedy ones.
Symptom:
Upstream: "!!!!" for requests without a seed. Here: a greedy request is sampled with a neighbour's
parameters. Uniform batches are right.
Risk and impact:
Real traffic is mixed; tests seldom are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "vllm-project/vllm#10863"
TARGET = "lockstep.sample.sampler:settings"
CELLS = ("seeds/llama", "engine-batch/llama")
RELATED = ("sglang-11096", "sglang-7207", "trtllm-6136")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def settings(batch: Any, vocab_size: int) -> Any:
        how = old(batch, vocab_size)
        order = (how.floats[:, 0] == 0).argsort(stable=True)
        return how._replace(floats=how.floats[order], ints=how.ints[order])

    return settings
