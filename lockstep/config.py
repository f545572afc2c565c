"""What an engine is asked to be: one frozen value, checked once, with the names that users know from the command line.

`LLM(...)` and `lockstep generate` make it; nobody changes it afterwards. Knows numbers and names, no model and no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from lockstep.types import INT32_MAX, KV_BYTES, RuleError


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. None means: derived from the model and the machine, and printed at start."""

    model: str | None = None  # a folder or a hub id; None is the built-in model
    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"
    attention_backend: str | None = None
    page_size: int = 16
    chunked_prefill_size: int = 512  # rows per step
    disable_radix_cache: bool = False
    max_running_requests: int = 64
    max_total_tokens: int | None = None  # keys that the cache holds
    mem_fraction_static: float = 0.3  # of the free memory, for the cache, where max_total_tokens is not given
    context_length: int | None = None

    def __post_init__(self) -> None:
        whole = ("page_size", "chunked_prefill_size", "max_running_requests", "max_total_tokens", "context_length")
        for name in whole:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= INT32_MAX):
                raise RuleError(f"{name} is a whole number from 1 to {INT32_MAX}", repr(value), "Leave it out for the default")
        if self.device not in ("cpu",):
            raise RuleError("device is cpu", repr(self.device), "GPU backends are not there yet")
        if self.dtype != "float32":
            raise RuleError("on the CPU dtype is float32", repr(self.dtype), "Leave it out")
        if self.kv_cache_dtype not in KV_BYTES:
            raise RuleError(f"kv_cache_dtype is one of {', '.join(KV_BYTES)}", repr(self.kv_cache_dtype), "Pick one of these")
        if not 0 < self.mem_fraction_static < 1:
            raise RuleError("mem_fraction_static is between 0 and 1", repr(self.mem_fraction_static), "0.3 is the default")

    @staticmethod
    def from_names(given: Mapping[str, Any]) -> EngineConfig:
        """A config from keyword arguments; an unknown one is an error with a suggestion."""
        known = [f.name for f in fields(EngineConfig)]
        for name in given:
            if name not in known:
                close = get_close_matches(name, known, 1)
                raise RuleError(
                    f"an engine option is one of {', '.join(known)}", repr(name), f"Did you mean {close[0]}" if close else "Drop it"
                )
        return EngineConfig(**given)
