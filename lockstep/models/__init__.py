"""One file per model_type describes a model; `loader` loads it."""

from collections.abc import Callable
from typing import Any, NamedTuple

Config = Any  # a model's config.json with the defaults of its family, as transformers reads it


class Spec(NamedTuple):
    """A model whose config needs no translation: `build` takes a `WeightSource`."""

    build: Callable[[Any], Any]
