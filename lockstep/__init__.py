"""Lockstep: LLM inference whose answers are a function of model, prompt, parameters and seed, and
of nothing else. `from lockstep import LLM, SamplingParams`; nothing else is imported until one of
these names is used: the plan and the page bookkeeping work without torch."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOME = {"LLM": "lockstep.llm.api", "SamplingParams": "lockstep.sample.params"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    known = ", ".join(__all__)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}; there are {known}")
