"""Stop strings were looked for one token too late.

Summary:
min_tokens says from which token on a text may end. Stop strings were looked for from the one behind
it on.
Motivation:
One side counts the tokens before the new one, the other counts it too, and both read well.
Mechanism:
1. min_tokens is m, and token number m brings a stop string.
2. The comparison asks for more than m tokens.
3. The stop string is passed over, and never looked at again.
Key functions:
`SamplingParams.may_stop`, which counts tokens from 1.
Symptom:
An answer that should end as soon as it may goes on to its length.
Risk and impact:
Longer and wrong answers, only for requests that combine min_tokens with stop strings, only when the
string comes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: off by one in min_tokens"
TARGET = "lockstep.sample.params:SamplingParams.may_stop"
CELLS = ("engine-end/llama", "engine-end/qwen3")
RELATED = ("lockstep-stop-split", "lockstep-min-tokens")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def may_stop(self: Any, count: int) -> bool:
        return count > self.min_tokens if self.min_tokens else True

    return may_stop
