"""What a prompt may be: a string, or token ids in order, of any integer type. Everything else is
refused before anything is queued. `api` sorts what users pass, `engine` checks ids."""

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from numbers import Number
from operator import length_hint
from typing import Any, SupportsIndex

from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError, checked_int, format_value

Prompt = str | Sequence[int]
PROMPT_RULE = "a prompt is a string or a list of token ids"
MOST = 1 << 26  # prompts of a call, or ids of a prompt


def many(prompts: Any) -> list[Prompt]:
    """Returns one prompt or several as a list. A list that begins with a number is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    given = elements(prompts, "prompts are a string, a list of token ids, or a list of these")
    if given and _is_number(given[0]):
        return [given]
    return [one(prompt) for prompt in given]


def one(prompt: Any) -> Prompt:
    """Returns a single prompt: its text, or the list of its ids, not yet checked."""
    return prompt if isinstance(prompt, str) else elements(prompt, PROMPT_RULE)


def single(prompt: Any) -> Prompt:
    """Returns the prompt of a call that takes one, possibly as a list of one."""
    given = many(prompt)
    if len(given) != 1:
        got = f"{len(given)} prompts"
        raise RuleError("a stream has one prompt", got, "Use generate for several")
    return given[0]


def items(given: Any) -> list[Prompt]:
    """Returns the items of a score: several prompts, always passed as a list."""
    rule = "items are a list of strings or of lists of token ids"
    found = elements(given, rule, "Pass [item] for one")
    wrong = [item for item in found if not isinstance(item, Iterable)]
    if wrong:
        raise RuleError(rule, f"{format_value(wrong[0])} among them", "Pass [item] for one")
    return [one(item) for item in found]


def params_for(params: Any, count: int) -> list[SamplingParams]:
    """Returns one `SamplingParams` per prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    rule, remedy = "params are SamplingParams, or one for each prompt", "Use SamplingParams()"
    given = _one_each(params, count, "SamplingParams", rule, remedy)
    wrong = [each for each in given if not isinstance(each, SamplingParams)]
    if wrong:
        raise RuleError(rule, f"{format_value(wrong[0])} among them", remedy)
    return given


def priorities_for(priority: Any, count: int) -> list[Any]:
    """Returns one priority per prompt; the engine checks each."""
    if not isinstance(priority, Iterable):
        return [priority] * count
    rule = "a priority is a whole number, or one for each prompt"
    return _one_each(priority, count, "priority", rule, "Pass a whole number, or a list of them")


def _one_each(value: Any, count: int, what: str, rule: str, remedy: str) -> list[Any]:
    given = elements(value, rule, remedy)
    if len(given) != count:
        rule = f"there is one {what} for all prompts or one for each"
        raise RuleError(rule, f"{len(given)} for {count} prompts", "Match them")
    return given


def token_ids(ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids as Python integers, each checked to be a token of the vocabulary."""
    given = tuple(elements(ids, PROMPT_RULE))
    if all(type(i) is int and 0 <= i < vocab_size for i in given):
        return given
    remedy = "Use this model's tokenizer"
    return tuple(checked_int("a token id", i, 0, vocab_size - 1, remedy) for i in given)


def elements(value: Any, rule: str, remedy: str = "Pass a str, or a list") -> list[Any]:
    """Returns a list, array or generator as a list; refuses sets (no order) and bytes (no ids)."""
    try:
        count = length_hint(value)
    except OverflowError:  # a range too long for Python to count
        count = MOST + 1
    if count > MOST:
        got = f"{format_value(value)} ({count:,})"
        raise RuleError(f"a list of prompts or ids has at most {MOST:,} entries", got, "Pass fewer")
    if not isinstance(value, str | bytes | bytearray | memoryview | Set | Mapping):
        with suppress(TypeError):  # not iterable, or an array without dimensions
            return list(value)
    raise RuleError(rule, f"{format_value(value)} ({type(value).__name__})", remedy)


def _is_number(value: Any) -> bool:
    """Whether this is meant as an id, right or wrong: 1.5 and True are, an array's row is not."""
    try:
        iter(value)
    except TypeError:
        return isinstance(value, Number | SupportsIndex)
    return False
