"""An engine's settings: one frozen value, validated once, with the names of the command line's
options. `LLM(...)` and `lockstep generate` make it. Knows no model and no device."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Self

from lockstep.types import INT32_MAX, KV_FORMATS, RuleError, checked_int, format_value, with_fields

DEFAULT, FIRST = "Leave it out for the default", "Leave it out for the first that fits"
FOLDER = "a folder or a hub id of the form owner/name"
SPECULATIVE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
# None: from the model and the machine, or the algorithm
DERIVED = ("max_total_tokens", "context_length", *SPECULATIVE)
ALGORITHMS = ("ngram", "draft", "eagle", "eagle3")
CHOICES = {"kv_cache_dtype": ("auto", *KV_FORMATS), "load_format": ("auto", "dummy")}
COUNTS = ("page_size", "chunked_prefill_size", "max_running_requests", *DERIVED)
KINDS: Mapping[str, tuple[Any, str, str]] = {  # the type, and rule and remedy for any other
    "device": (str, "a name", DEFAULT),
    "dtype": (str, "a name", DEFAULT),
    "disable_radix_cache": (bool, "True or False", "Pass a bool"),
    "graphs": (bool | None, "True or False", "Pass a bool"),
    "attention_backend": (str | None, "the name of a backend", FIRST),
}


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. None: derived from the model and the machine, and printed at start."""

    model: str | None = None  # a folder or a hub id; None is the built-in model
    device: str = "auto"  # auto: a supported GPU if there is one, otherwise the CPU
    dtype: str = "auto"  # of activations; auto: the device's default
    kv_cache_dtype: str = "auto"  # auto: that of activations
    load_format: str = "auto"  # auto: safetensors; dummy: random weights, from a config alone
    attention_backend: str | None = None
    page_size: int = 16
    chunked_prefill_size: int = 512  # rows per step
    disable_radix_cache: bool = False
    max_running_requests: int = 64
    max_total_tokens: int | None = None  # keys that the cache holds
    # the cache's share of the free memory if max_total_tokens is None; None: 0.3 of a machine's,
    # 0.8 of a GPU's
    mem_fraction_static: float | None = None
    context_length: int | None = None
    bucket_sizes: tuple[int, ...] | None = None  # rows that steps are padded to; None: no padding
    # likewise of requests and of emitted rows; None: the same counts
    request_bucket_sizes: tuple[int, ...] | None = None
    emit_bucket_sizes: tuple[int, ...] | None = None
    # whether launches are recorded and replayed, as graphs on a GPU, as calls of compiled code on
    # the CPU; None: decoding steps are; on the CPU True records every launch, as a test
    graphs: bool | None = None
    # makes draft tokens, which are verified several at a time: the same answers, sooner
    speculative_algorithm: str | None = None
    speculative_draft_model: str | None = None  # a folder or a hub id; None: the built-in one
    speculative_num_steps: int | None = None  # the depth of the draft
    speculative_eagle_topk: int | None = None  # draft tokens tried after each; 1 is a chain
    # rows that verify a draft, the last token's included; None: derived from the two above
    speculative_num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) is not None or name not in DERIVED:
                count = checked_int(name, getattr(self, name), 1, INT32_MAX, DEFAULT)
                object.__setattr__(self, name, count)
        for name, known in CHOICES.items():
            fits = isinstance(getattr(self, name), str) and getattr(self, name) in known
            self._check(name, fits, f"one of {', '.join(known)}", "Pick one of these")
        for name, (kind, rule, remedy) in KINDS.items():
            self._check(name, isinstance(getattr(self, name), kind), rule, remedy)
        self._check("model", is_model(self.model), FOLDER, "Leave it out for the built-in model")
        fraction = self.mem_fraction_static
        number = isinstance(fraction, Real) and not isinstance(fraction, bool) and 0 < fraction < 1
        self._check("mem_fraction_static", fraction is None or number, "a number between 0 and 1")
        self._check_buckets()
        self._check_speculation()

    def settled(self, dtype: str) -> Self:
        """Returns the config with kv_cache_dtype "auto" replaced by `dtype`, the activations'."""
        return replace(self, kv_cache_dtype=dtype) if self.kv_cache_dtype == "auto" else self

    def _check_speculation(self) -> None:
        """Raises unless the algorithm exists, and its options are given only with it."""
        algorithm = self.speculative_algorithm
        fits = isinstance(algorithm, str | None) and algorithm in (None, *ALGORITHMS)
        rule = f"one of {', '.join(ALGORITHMS)}"
        self._check("speculative_algorithm", fits, rule, "Leave it out to decode without drafts")
        model = self.speculative_draft_model
        self._check("speculative_draft_model", is_model(model), "a folder or a hub id of a draft")
        for name in (*SPECULATIVE, "speculative_draft_model"):
            fits = algorithm is not None or getattr(self, name) is None
            self._check(name, fits, "given only with speculative_algorithm", "Set both")
        if algorithm == "ngram" and (model is not None or (self.speculative_eagle_topk or 1) > 1):
            rule = "ngram drafts one chain from the text, without a model"
            got = f"draft model {model}, top-k {self.speculative_eagle_topk}"
            raise RuleError(rule, got, "Leave both out")
        if algorithm == "draft" and model is None:
            rule = "the algorithm draft needs speculative_draft_model"
            raise RuleError(rule, "none", "Name a model with the same vocabulary")

    def _check(self, name: str, holds: bool, rule: str, remedy: str = DEFAULT) -> None:
        if not holds:
            raise RuleError(f"{name} is {rule}", format_value(getattr(self, name)), remedy)

    def _check_buckets(self) -> None:
        # one more than the running requests, for a pad request; a step full of rows needs none
        most = {
            "bucket_sizes": self.chunked_prefill_size,
            "request_bucket_sizes": min(self.max_running_requests + 1, self.chunked_prefill_size),
            "emit_bucket_sizes": 1,
        }
        for name, needed in most.items():
            sizes = getattr(self, name)
            if sizes is None:
                continue
            fits = self.bucket_sizes is not None
            self._check(name, fits, "given only with bucket_sizes", "Set both")
            listed = isinstance(sizes, tuple | list) and len(sizes) > 0
            counts = listed and all(type(n) is int and 1 <= n <= INT32_MAX for n in sizes)
            rising = counts and list(sizes) == sorted(set(sizes))
            rule = f"a rising list of whole numbers from 1 to {INT32_MAX}"
            self._check(name, rising, rule, "Use for example (1, 2, 4, 8, 16, 512)")
            if sizes[-1] < needed:
                rule = f"the largest of {name} holds a step of {needed}"
                raise RuleError(rule, str(sizes[-1]), "Add a larger one, or schedule less per step")
            object.__setattr__(self, name, tuple(sizes))

    @classmethod
    def from_names(cls, given: Mapping[str, Any]) -> Self:
        """Makes a config from keyword arguments; an unknown one is an error with a suggestion."""
        return with_fields(cls, given, "an engine option")


def is_model(name: object) -> bool:
    """Whether `name` may name a folder or a hub id; None is the built-in model."""
    return name is None or (isinstance(name, str | os.PathLike) and str(name) != "")
