"""What an engine is asked to be: one frozen value, checked once, with the names that users know
from the command line.

`LLM(...)` and `lockstep generate` make it; nobody changes it afterwards. Knows numbers and names,
no model and no device.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Real
from typing import Any

from lockstep.types import INT32_MAX, KV_FORMATS, RuleError, shown

DERIVED = ("max_total_tokens", "context_length")  # None: from the model and the machine
COUNTS = ("page_size", "chunked_prefill_size", "max_running_requests", *DERIVED)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. None means: derived from the model and the machine, and printed at
    start."""

    model: str | None = None  # a folder or a hub id; None is the built-in model
    device: str = "cpu"
    dtype: str = "auto"  # of activations; auto is the device's own
    kv_cache_dtype: str = "float32"
    attention_backend: str | None = None
    page_size: int = 16
    chunked_prefill_size: int = 512  # rows per step
    disable_radix_cache: bool = False
    max_running_requests: int = 64
    max_total_tokens: int | None = None  # keys that the cache holds
    mem_fraction_static: float = (
        0.3  # of the free memory, for the cache, where max_total_tokens is not given
    )
    context_length: int | None = None
    # steps are padded up to these counts of rows; None: never
    bucket_sizes: tuple[int, ...] | None = None
    # and of requests and of emitted rows; None: the same counts
    request_bucket_sizes: tuple[int, ...] | None = None
    emit_bucket_sizes: tuple[int, ...] | None = None
    # a launch is recorded once per bucket and replayed: on the CPU by a tape, which is a test of
    # launches and makes nothing faster
    graphs: bool = False

    def __post_init__(self) -> None:
        for name in COUNTS:
            self._check_count(name)
        if self.model is not None and not (
            isinstance(self.model, str | os.PathLike) and str(self.model)
        ):
            rule = "model is a folder or a hub id of the form owner/name"
            raise RuleError(rule, shown(self.model), "Leave it out for the built-in model")
        for name in ("device", "dtype"):
            if not isinstance(getattr(self, name), str):
                got = shown(getattr(self, name))
                raise RuleError(f"{name} is a name", got, "Leave it out for the default")
        if not isinstance(self.kv_cache_dtype, str) or self.kv_cache_dtype not in KV_FORMATS:
            rule = f"kv_cache_dtype is one of {', '.join(KV_FORMATS)}"
            raise RuleError(rule, shown(self.kv_cache_dtype), "Pick one of these")
        if self.attention_backend is not None and not isinstance(self.attention_backend, str):
            rule = "attention_backend is the name of a backend"
            got = shown(self.attention_backend)
            raise RuleError(rule, got, "Leave it out for the first that fits")
        for name in ("disable_radix_cache", "graphs"):
            if not isinstance(getattr(self, name), bool):
                rule = f"{name} is True or False"
                raise RuleError(rule, shown(getattr(self, name)), "Pass a bool")
        fraction = self.mem_fraction_static
        if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 < fraction < 1:
            rule = "mem_fraction_static is a number between 0 and 1"
            raise RuleError(rule, shown(fraction), "0.3 is the default")
        self._check_buckets()

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name in DERIVED:
            return
        try:
            count = 0 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            count = 0
        if not 1 <= count <= INT32_MAX:
            rule = f"{name} is a whole number from 1 to {INT32_MAX}"
            raise RuleError(rule, shown(value), "Leave it out for the default")
        object.__setattr__(self, name, count)

    def _check_buckets(self) -> None:
        # a step of as many requests as it may have needs no pad request if it fills its rows
        most = {
            "bucket_sizes": self.chunked_prefill_size,
            "request_bucket_sizes": min(self.max_running_requests + 1, self.chunked_prefill_size),
            "emit_bucket_sizes": 1,
        }
        for name, needed in most.items():
            sizes = getattr(self, name)
            if sizes is None:
                continue
            if self.bucket_sizes is None:
                raise RuleError(f"{name} come with bucket_sizes", shown(sizes), "Name those too")
            whole = isinstance(sizes, tuple | list) and all(
                type(size) is int and 1 <= size <= INT32_MAX for size in sizes
            )
            if not whole or not sizes or list(sizes) != sorted(set(sizes)):
                rule = f"{name} are rising whole numbers from 1 to {INT32_MAX}"
                raise RuleError(rule, shown(sizes), "Use for example (1, 2, 4, 8, 16, 512)")
            if sizes[-1] < needed:
                rule = f"the largest of {name} holds a step of {needed}"
                raise RuleError(rule, str(sizes[-1]), "Add a larger one, or schedule less per step")
            object.__setattr__(self, name, tuple(sizes))

    @staticmethod
    def from_names(given: Mapping[str, Any]) -> EngineConfig:
        """A config from keyword arguments; an unknown one is an error with a suggestion."""
        known = [f.name for f in fields(EngineConfig)]
        for name in given:
            if name not in known:
                close = get_close_matches(name, known, 1)
                rule = f"an engine option is one of {', '.join(known)}"
                got = repr(name)
                raise RuleError(rule, got, f"Did you mean {close[0]}?" if close else "Drop it")
        return EngineConfig(**given)
