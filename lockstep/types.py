"""Frozen values that every module shares: what a KV group is and how a layer scores (both taken
from the model at load), KV formats, and errors. Imports neither torch nor numpy."""

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
INT32_MAX = 2**31 - 1
OUR_BUG = "This is a bug in Lockstep: please report it"  # the remedy where the user is not at fault


class RuleError(ValueError):
    """A user's error: the rule, the value that breaks it, and the remedy."""

    def __init__(self, rule: str, got: str, remedy: str) -> None:
        end = "" if remedy.endswith("?") else "."
        super().__init__(f"{rule}; got {got}. {remedy}{end}")
        self.rule, self.got, self.remedy = rule, got, remedy

    def __reduce__(self) -> tuple[type["RuleError"], tuple[str, str, str]]:
        return type(self), (self.rule, self.got, self.remedy)


def format_value(value: object) -> str:
    """Formats a value for an error, on one line: its repr, shortened, or its type if that fails."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer that Python refuses to print
        return f"an {type(value).__name__} too long to print"
    except Exception as error:  # whatever a user's class raises
        return f"a {type(value).__name__} whose repr fails: {type(error).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Returns the remedy for an unknown word: the nearest known one if any is near."""
    close = get_close_matches(word, list(known), 1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else otherwise


def check_one_of(known: Collection[str], name: str, value: Any, remedy: str) -> None:
    """Raises unless `value` is one of the `known` strings."""
    if not isinstance(value, str) or value not in known:
        raise RuleError(f"{name} is one of {', '.join(known)}", format_value(value), remedy)


def with_fields(kind: type[T], given: Mapping[str, Any], what: str) -> T:
    """Makes a dataclass from its fields by name; raises RuleError for an unknown name."""
    if not isinstance(given, Mapping):
        raise RuleError(f"{what} has a name", format_value(given), "Pass a dict")
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            remedy = did_you_mean(str(name), known, "Leave it out")
            raise RuleError(f"{what} is one of {', '.join(known)}", format_value(name), remedy)
    return kind(**given)


def checked_int(name: str, value: Any, low: int, high: int, remedy: str) -> int:
    """Returns `value` as an int in [low, high]. Takes any integer type, but no bool and no 1.0."""
    try:
        result = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        result = low - 1
    if not low <= result <= high:
        rule = f"{name} is a whole number from {low} to {high}"
        raise RuleError(rule, format_value(value), remedy)
    return result


class PlanError(RuleError):
    """A step that must not run: the plan breaks a rule of `plan.check`."""


class OutOfPages(RuleError):
    """The pool has fewer free pages than asked for; nothing was taken."""


class Refused(RuleError):
    """A backend or device that cannot be loaded, or cannot do what the model needs."""


class Layout(StrEnum):
    """How a group stores its keys, if at all."""

    DENSE = "dense"  # pages of K and of V
    LATENT = "latent"  # MLA: one row of rank+rope per token, V is its first rank columns
    CROSS = "cross"  # pages written once by the encoder's rows, read by the decoder's
    FRESH = "fresh"  # no cache: the keys of a request are its own rows of this step


class KvFormat(NamedTuple):
    """How one number of the cache is stored."""

    code: int  # identifies the format in kernels
    nbytes: int  # bytes per number
    torch_name: str  # the dtype's name in torch
    largest: float | None = None  # values are clamped to ± this; None: no such limit


KV_FORMATS = {
    "float32": KvFormat(code=0, nbytes=4, torch_name="float32"),
    "bfloat16": KvFormat(code=1, nbytes=2, torch_name="bfloat16"),
    "float8_e4m3": KvFormat(code=2, nbytes=1, torch_name="float8_e4m3fn", largest=448.0),
    "float16": KvFormat(code=3, nbytes=2, torch_name="float16", largest=65504.0),
}


class Choice(NamedTuple):
    """What was chosen at start, and the reason, which is printed."""

    name: str
    reason: str


@dataclass(frozen=True)
class AttnSpec:
    """How one layer turns scores into weights. score = scale * k_scale * (q . k_stored)."""

    scale: float
    soft_cap: float | None = None  # a score becomes cap * tanh(score / cap)
    sinks: tuple[float, ...] | None = None  # a logit per query head, once in a row's denominator
    k_scale: float = 1.0
    v_scale: float = 1.0  # V = v_scale * stored V

    def __post_init__(self) -> None:
        for name in ("scale", "soft_cap", "k_scale", "v_scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                remedy = "Use None for no cap" if name == "soft_cap" else "Use the checkpoint's"
                raise RuleError(f"{name} is a finite number above 0", repr(value), remedy)


@dataclass(frozen=True)
class GroupSpec:
    """The layers that share a KV layout and a visible range."""

    layout: Layout
    heads: int
    kv_heads: int
    d_qk: int
    d_v: int
    layers: tuple[AttnSpec, ...]  # one per layer of the group
    page_size: int = 16
    kv_dtype: str = "float32"
    window: int | None = None  # w: a row at p sees [p-w+1, p], w keys, itself included; None: all
    causal: bool = True  # False: cross attention and encoders, rows see every key of the request

    def __post_init__(self) -> None:
        sizes = (self.heads, self.kv_heads, self.d_qk, self.d_v, self.page_size, len(self.layers))
        if min(sizes) < 1:
            rule = "heads, kv_heads, head sizes, page_size and layers are at least 1"
            raise RuleError(rule, repr(self), "Check the model's config")
        if self.heads % self.kv_heads:
            rule = "heads is a multiple of kv_heads"
            raise RuleError(rule, f"{self.heads} and {self.kv_heads}", "Check the model's config")
        check_one_of(KV_FORMATS, "kv_dtype", self.kv_dtype, "Pick one of these")
        for attn in self.layers:
            if attn.sinks is not None and len(attn.sinks) != self.heads:
                got = f"{len(attn.sinks)} sinks, {self.heads} heads"
                raise RuleError("sinks hold one logit per query head", got, "Check the weights")
        if self.window is not None and not 1 <= self.window <= INT32_MAX:
            rule = "window, the number of keys a row sees, itself included, is at least 1"
            raise RuleError(rule, repr(self.window), "Use None for no window")
        if self.window is not None and not self.causal:
            rule = "a window needs a causal group"
            raise RuleError(rule, f"window={self.window}, causal=False", "Drop one of them")
        if self.layout is Layout.CROSS and self.causal:
            raise RuleError("a cross group is not causal", "causal=True", "Pass causal=False")
        if self.layout is not Layout.CROSS and self.layout is not Layout.FRESH and not self.causal:
            rule = "a cached group is causal: a later row would change an earlier one"
            raise RuleError(rule, "causal=False", "Use Layout.FRESH or Layout.CROSS")
        if self.layout is Layout.LATENT and (self.kv_heads != 1 or self.d_v > self.d_qk):
            rule = "a latent group has one kv head, whose first d_v of d_qk columns are V"
            got = f"kv_heads={self.kv_heads}, d_qk={self.d_qk}, d_v={self.d_v}"
            raise RuleError(rule, got, "Use kv_heads=1 and d_v <= d_qk")
        if self.layout is Layout.LATENT and any(a.v_scale != a.k_scale for a in self.layers):
            rule = "a latent group's k_scale and v_scale are equal: K and V are the same numbers"
            raise RuleError(rule, "different scales", "Give both the same scale")
        scaled = any(attn.k_scale != 1 or attn.v_scale != 1 for attn in self.layers)
        if self.layout is Layout.FRESH and (scaled or self.kv_dtype != "float32"):
            got = f"kv_dtype={self.kv_dtype} or a K/V scale"
            raise RuleError("a fresh group stores no keys", got, "Use float32 and scales of 1")

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads
