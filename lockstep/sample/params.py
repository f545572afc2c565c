"""A user's sampling parameters, validated in full when they are made: a parameter that is accepted
is honoured. Defaults are OpenAI's constants, never a checkpoint's. Knows no model and no torch."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np

from lockstep.sample.formulas import MAX_VOCAB, ln
from lockstep.types import RuleError, checked_int, format_value, with_fields

MAX_TOKENS, MAX_COMPLETIONS, MAX_LOGPROBS = 2**24, 128, 20
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS = 16, 256, 1024
MAX_BIASES, MAX_BIAS = 1024, 100.0
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 2.0
MIN_P = 1e-300  # below it, min_p keeps every token with a finite logit

# integers, then numbers: least, most, and the remedy
WHOLES = {
    "max_tokens": (1, MAX_TOKENS, "Use None for as many as the context leaves"),
    "top_k": (-1, MAX_VOCAB, "Use 0 or -1 to keep every token"),
    "seed": (-(2**63), 2**63 - 1, "Use None for a seed of its own"),
    "n": (1, MAX_COMPLETIONS, "Send several requests, with sample_index to tell them apart"),
    "min_tokens": (0, MAX_TOKENS, "Use 0 for no minimum"),
    "sample_index": (0, 2**31 - MAX_COMPLETIONS - 1, "Use 0 for the first completion"),
}
OPTIONAL = ("max_tokens", "seed")
NUMBERS = {
    "temperature": (0, MAX_TEMPERATURE, "Use 0 for the best token"),  # or from MIN_TEMPERATURE on
    "top_p": (0, 1, "Use 1 to keep every token, temperature=0 for the best one"),  # not 0 itself
    "min_p": (0, 1, "Use 0 to keep every token"),
    "presence_penalty": (-2, 2, "Use 0 for none"),
    "frequency_penalty": (-2, 2, "Use 0 for none"),
    "repetition_penalty": (0.01, 10, "Use 1 for none"),
}


class Numbers(NamedTuple):
    """One completion's parameters as a kernel takes them, and what else they require."""

    floats: tuple[float, float, float]  # temperature (0: greedy), top-p, ln of min-p
    ints: tuple[int, int, int]  # top-k (0: all), index, seed
    cuts: bool  # whether top-k or top-p may exclude tokens
    edits: bool  # whether bias or penalties change the logits
    top: int | None  # `SamplingParams.top_logprobs`


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, how long, and what to report."""

    max_tokens: int | None = 16  # tokens to generate at most; None: as many as the context leaves
    temperature: float = 1.0  # 0: the best token, without noise; otherwise logits are divided by it
    top_p: float = 1.0  # keep the best tokens with at least this probability together, after top_k
    top_k: int = 0  # keep this many of the best tokens; 0 and -1 both mean all
    min_p: float = 0.0  # keep tokens with at least this fraction of the best token's probability
    seed: int | None = None  # int64; None: the engine draws one per request and reports it
    stop: str | Sequence[str] = ()  # strings that end the text, which is cut before them
    stop_token_ids: Sequence[int] = ()  # tokens that end the generation, like the model's own EOS
    n: int = 1  # completions; number i equals n=1 with sample_index=sample_index+i
    logprobs: int | bool | None = None  # True: of chosen tokens; k: of the k best too
    prompt_logprobs: int | bool | None = None  # same for the prompt's tokens
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # {token id: added}
    presence_penalty: float = 0.0  # taken off the logit of every token generated so far
    frequency_penalty: float = 0.0  # taken off as often as the token was generated
    repetition_penalty: float = 1.0  # divides positive logits, multiplies negative ones
    ignore_eos: bool = False  # the model's EOS does not end the generation; stops do
    min_tokens: int = 0  # EOS and stop_token_ids cannot be chosen before this many tokens
    sample_index: int = 0  # which of a seed's completions this is
    speculative: bool = True  # False: decoded without drafts, whatever the engine's setting

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "stop": _stop(self.stop),
            "stop_token_ids": _stop_ids(self.stop_token_ids),
            "logprobs": _logprobs("logprobs", self.logprobs),
            "prompt_logprobs": _logprobs("prompt_logprobs", self.prompt_logprobs),
            "logit_bias": _biases(self.logit_bias),
        }
        for name, (low, high, remedy) in WHOLES.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                checked[name] = checked_int(name, value, low, high, remedy)
        for name, (least, most, remedy) in NUMBERS.items():
            value, above = getattr(self, name), name == "top_p"
            checked[name] = number(name, value, least, most, remedy, above=above)
        if 0 < checked["temperature"] < MIN_TEMPERATURE:
            rule = f"temperature is 0 or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}"
            raise RuleError(rule, format_value(self.temperature), "Use 0 for the best token")
        for name in ("ignore_eos", "speculative"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RuleError(f"{name} is True or False", format_value(value), "Pass a bool")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            got = f"min_tokens={self.min_tokens}, max_tokens={self.max_tokens}"
            raise RuleError("min_tokens is at most max_tokens", got, "Raise max_tokens")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        return with_fields(cls, given, "a parameter")

    def check_vocab(self, vocab_size: int) -> None:
        """Raises for ids that the model does not have: here, never on the device."""
        named = {"logit_bias": [i for i, _ in self.biases], "stop_token_ids": self.stop_token_ids}
        for name, ids in named.items():
            for bad in [i for i in ids if not 0 <= i < vocab_size]:
                rule = f"{name} names tokens from 0 to {vocab_size - 1}"
                raise RuleError(rule, str(bad), "Use ids of this model's tokenizer")
        tops = {"logprobs": self.top_logprobs, "prompt_logprobs": self.top_prompt_logprobs}
        for name, top in tops.items():
            if top is not None and top > vocab_size:
                rule = f"{name} is at most the vocabulary's size, {vocab_size}"
                raise RuleError(rule, str(top), "Ask for fewer")

    def completions(self) -> tuple[Self, ...]:
        """Returns parameters per completion (n = 1), each of which gives the same answer alone."""
        return tuple(replace(self, n=1, sample_index=self.sample_index + i) for i in range(self.n))

    def max_new_len(self, room: int) -> int:
        """Returns the most tokens to generate if the context leaves room for `room`."""
        return room if self.max_tokens is None else self.max_tokens

    def may_stop(self, count: int) -> bool:
        """Whether a stop string may end the text at token number `count`, counted from 1."""
        return count >= self.min_tokens

    @property
    def greedy(self) -> bool:
        """No noise: the best token, after bias, penalties and min_tokens."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @cached_property
    def numbers(self) -> Numbers:
        """The `Numbers` of one completion with a resolved seed: made once, read at every step."""
        if self.n != 1 or (self.seed is None and not self.greedy):
            rule = "a sampled row has a seed and n=1"
            remedy = "Call resolve_seed and completions once per request"
            raise RuleError(rule, f"seed={self.seed}, n={self.n}", remedy)
        min_log = float(ln(np.float64(self.min_p))) if self.min_p >= MIN_P else -np.inf
        return Numbers(
            floats=(self.temperature, self.top_p, min_log),
            ints=(max(self.top_k, 0), self.sample_index, self.seed or 0),
            cuts=self.top_k > 0 or self.top_p < 1,
            edits=bool(self.biases) or self.penalised,
            top=self.top_logprobs,
        )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs, sorted by id."""
        pairs: Any = self.logit_bias
        return tuple(pairs)

    @property
    def top_logprobs(self) -> int | None:
        """How many best tokens to report beside the chosen one; None: nothing."""
        return _top_count(self.logprobs)

    @property
    def top_prompt_logprobs(self) -> int | None:
        return _top_count(self.prompt_logprobs)


def resolve_seed(params: SamplingParams) -> SamplingParams:
    """Returns `params` with a seed: the user's, or one drawn now from the operating system."""
    if params.seed is not None:
        return params
    return replace(params, seed=int.from_bytes(os.urandom(8), "little") >> 1)


def number(
    name: str, value: Any, low: float, high: float, remedy: str, above: bool = False
) -> float:
    """Returns `value` as a float in [low, high], or in (low, high] with `above`; raises if not."""
    try:
        result = float("nan") if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = float("nan")
    if not low <= result <= high or (above and result == low):  # NaN is not in any range
        limits = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise RuleError(f"{name} is a number {limits}", format_value(value), remedy)
    return result


def _top_count(value: int | bool | None) -> int | None:
    if value is None or value is False:
        return None
    return 0 if value is True else int(value)


def _logprobs(name: str, value: Any) -> int | bool | None:
    if value is None or isinstance(value, bool):
        return value
    return checked_int(name, value, 0, MAX_LOGPROBS, "Use True for the chosen token alone")


def _list_of(name: str, value: Any, what: str, most: int) -> list[Any]:
    """Returns the elements of a list, at most `most`; none for None."""
    if value is None:
        return []
    rule = f"{name} is a list of at most {most} {what}"
    error = RuleError(rule, format_value(value), "Pass a list")
    if isinstance(value, str | bytes | Mapping):
        raise error
    try:
        items = list(islice(value, most + 1))
    except TypeError:  # not an iterable, or an array without dimensions
        raise error from None
    if len(items) > most:
        raise RuleError(rule, format_value(value), "Pass fewer")
    return items


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    items = _list_of("stop", value, "strings", MAX_STOPS)
    for item in items:
        if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_CHARS:
            got = f"one of {len(item)} characters" if isinstance(item, str) else format_value(item)
            rule = f"a stop is a string of 1 to {MAX_STOP_CHARS} characters"
            raise RuleError(rule, got, "Leave it out, or use stop_token_ids")
        if any("\ud800" <= character <= "\udfff" for character in item):
            got = f"{format_value(item)}, with a lone surrogate"
            raise RuleError("a stop is valid Unicode", got, "No text has one: leave it out")
    return tuple(dict.fromkeys(items))


def _stop_ids(value: Any) -> tuple[int, ...]:
    items = _list_of("stop_token_ids", value, "token ids", MAX_STOP_IDS)
    return tuple(dict.fromkeys(_token_id("a stop token id", item) for item in items))


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Returns sorted pairs from {id: bias}, with JSON's string keys too, or from such pairs."""
    rule = f"logit_bias maps at most {MAX_BIASES} token ids to numbers"
    pairs = [] if value is None else list(value.items()) if isinstance(value, Mapping) else value
    listed = isinstance(pairs, list | tuple)
    bad = not listed or len(pairs) > MAX_BIASES
    if bad or any(not isinstance(p, tuple) or len(p) != 2 for p in pairs):
        got = f"{len(pairs)} entries" if listed else format_value(value)
        raise RuleError(rule, got, "Pass a mapping {token id: bias}")
    found: dict[int, float] = {}
    for key, bias in pairs:
        json_key = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10
        token = _token_id("a token id of logit_bias", int(key) if json_key else key)
        if token in found:
            raise RuleError("logit_bias names a token once", f"{token} twice", "Drop one of them")
        name, remedy = f"logit_bias of token {token}", "Use -100 to all but forbid a token"
        found[token] = number(name, bias, -MAX_BIAS, MAX_BIAS, remedy)
    return tuple(sorted(found.items()))


def _token_id(name: str, value: Any) -> int:
    return checked_int(name, value, 0, MAX_VOCAB - 1, "Use ids of the model's tokenizer")
