"""The end tokens of generation_config.json were ignored.

Summary:
A model's generation_config.json names the tokens that end its answers. The loader read config.json
instead.
Motivation:
config.json has a field of the same name, and for base models both agree.
Mechanism:
1. A chat model's generation_config lists its end-of-turn token besides its end-of-text token.
2. The loader takes eos_token_id from config.json.
3. The end-of-turn token does not end the answer.
Key functions:
`models.loader.special_ids`, which consults generation_config.json first.
Symptom:
A chat model continues past the end of its turn and answers itself, up to the length limit.
Risk and impact:
Every chat of such a model is affected. Its tokens up to the end of the turn are right, so
comparisons of logits show nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: eos_token_id of generation_config"
TARGET = "lockstep.models.loader:special_ids"
CELLS = ("engine-folder/llama",)
RELATED = ("lockstep-open-end",)


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def special_ids(name: str, extra: Any, config: Any) -> Any:
        return old(name, {}, config)

    return special_ids
