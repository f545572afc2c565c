"""Stop strings were checked one token too late.

Summary:
min_tokens is the number of the first token with which a text may end. Stop strings were checked
from the following token on.
Motivation:
One side counts the tokens before the new one, the other includes it, and both read well.
Mechanism:
1. min_tokens is m, and token number m completes a stop string.
2. The comparison asks for more than m tokens.
3. The stop string is missed and never checked again.
Key functions:
`SamplingParams.may_stop`, which counts tokens from 1.
Symptom:
An answer that should end as soon as it may continues to its length limit.
Risk and impact:
Longer, wrong answers, only for requests that combine min_tokens with stop strings, and only when
the string arrives with the first token that may end the text.
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
