"""What an engine is asked to be: one frozen value, checked once, with the names that users know
from the command line.

`LLM(...)` and `lockstep generate` make it; nobody changes it afterwards. Knows numbers and names,
no model and no device.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Real
from typing import Any

from lockstep.types import INT32_MAX, KV_FORMATS, RuleError, shown

DERIVED = ("max_total_tokens", "context_length")  # None: from the model and the machine
LOAD_FORMATS = ("auto", "dummy")
COUNTS = ("page_size", "chunked_prefill_size", "max_running_requests", *DERIVED)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. None means: derived from the model and the machine, and printed at
    start."""

    model: str | None = None  # a folder or a hub id; None is the built-in model
    device: str = "auto"  # a GPU if there is one that we know, otherwise the CPU
    dtype: str = "auto"  # of activations; auto is the device's own
    kv_cache_dtype: str = "auto"  # that of activations
    load_format: str = "auto"  # safetensors; dummy: random weights, of a config alone
    attention_backend: str | None = None
    page_size: int = 16
    chunked_prefill_size: int = 512  # rows per step
    disable_radix_cache: bool = False
    max_running_requests: int = 64
    max_total_tokens: int | None = None  # keys that the cache holds
    # of the free memory, for the cache, where max_total_tokens is not given; None: 0.3 of a
    # machine's, 0.8 of a GPU's
    mem_fraction_static: float | None = None
    context_length: int | None = None
    # steps are padded up to these counts of rows; None: never
    bucket_sizes: tuple[int, ...] | None = None
    # and of requests and of emitted rows; None: the same counts
    request_bucket_sizes: tuple[int, ...] | None = None
    emit_bucket_sizes: tuple[int, ...] | None = None
    # a launch is recorded once per bucket and replayed: on a GPU a graph, for decoding steps and
    # unless told otherwise; on the CPU a tape, which is a test of launches and makes nothing faster
    graphs: bool | None = None

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
        names = {"kv_cache_dtype": ("auto", *KV_FORMATS), "load_format": LOAD_FORMATS}
        for name, known in names.items():
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in known:
                rule = f"{name} is one of {', '.join(known)}"
                raise RuleError(rule, shown(getattr(self, name)), "Pick one of these")
        if self.attention_backend is not None and not isinstance(self.attention_backend, str):
            rule = "attention_backend is the name of a backend"
            got = shown(self.attention_backend)
            raise RuleError(rule, got, "Leave it out for the first that fits")
        for name in ("disable_radix_cache", "graphs"):
            unsaid = name == "graphs" and self.graphs is None
            if not isinstance(getattr(self, name), bool) and not unsaid:
                rule = f"{name} is True or False"
                raise RuleError(rule, shown(getattr(self, name)), "Pass a bool")
        fraction = 0.3 if self.mem_fraction_static is None else self.mem_fraction_static
        if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 < fraction < 1:
            rule = "mem_fraction_static is a number between 0 and 1"
            raise RuleError(rule, shown(fraction), "Leave it out for the default")
        self._check_buckets()

    def settled(self, dtype: str) -> EngineConfig:
        """With the cache of activations of `dtype`, where none was asked for."""
        auto = self.kv_cache_dtype == "auto"
        return replace(self, kv_cache_dtype=dtype) if auto else self

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
