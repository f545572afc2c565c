"""One file per model_type describes a model; `loader` loads it."""

from typing import Any

Config = Any  # a model's config.json with the defaults of its family, as transformers reads it
