"""The end tokens of generation_config.json were ignored.

Summary:
A model's generation_config names the tokens that end its answers. The loader read those of
config.json.
Motivation:
config.json has a field of the same name, and for base models both agree.
Mechanism:
1. A chat model's generation_config lists its end of turn besides its end of text.
2. The loader takes eos_token_id from config.json.
3. The end of turn ends nothing.
Key functions:
`models.loader.special_ids`, which asks generation_config.json first.
Symptom:
A chat model goes on behind its turn and answers itself, up to the length.
Risk and impact:
Every chat of such a model. Its tokens up to there are right, so comparisons of logits see nothing.
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
