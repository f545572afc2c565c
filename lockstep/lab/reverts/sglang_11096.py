"""Every request without a seed got the same seed.

Summary:
In deterministic mode every request has a seed. Without one, None reached the seeded sampler; later
every such request got 42.
Motivation:
A fixed default makes a run repeatable, which is the purpose of deterministic mode.
Mechanism:
1. Two users send the same prompt without a seed and expect two answers.
2. Both get the constant.
3. Their answers are the same, every time.
Key functions:
SGLang's sampler in deterministic mode. Here `sample.params.resolve_seed`: drawn once per request
and returned with the answer.
Symptom:
Retrying gives the same bad answer again; best-of-n by n requests is worth one answer.
Risk and impact:
No single answer looks wrong. The lab asks twice and compares the seeds that are returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.sample.params import SamplingParams

SOURCE = "sgl-project/sglang#11096"
TARGET = "lockstep.sample.params:resolve_seed"
CELLS = ("seeds/llama",)
RELATED = ("vllm-10863", "sglang-7207", "lockstep-sample-index")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def resolve_seed(params: SamplingParams) -> Any:
        return params if params.seed is not None else replace(params, seed=42)

    return resolve_seed
