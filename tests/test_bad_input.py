"""Bad input: each mistake gets its one true line, leaves nothing behind, and harms no other
request."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.attention import select
from lockstep.config import EngineConfig
from lockstep.lab import tiny
from lockstep.llm import prompts as forms
from lockstep.llm.engine import Engine
from lockstep.sample.formulas import MAX_VOCAB
from lockstep.types import RuleError, format_value

FOUR = SamplingParams(max_tokens=4, temperature=0, logprobs=True)
PROMPT = "a prompt is a string or a list of token ids"
IDS = "a token id is a whole number from 0 to 4095"


class Text(str):
    """A caller's own subclass of str."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_total_tokens=4096, context_length=256)


@pytest.fixture(scope="module")
def want(llm: LLM) -> bytes:
    return bits(llm)


def bits(llm: LLM) -> bytes:
    """Returns the bits of the answer to a plain request, which must be the same after every
    mistake."""
    (out,) = llm.generate("def fib(n):", FOUR)
    return out.logprobs.tobytes()


def refused(llm: LLM, want: bytes, call: Any, line: str) -> None:
    """Checks that the call is refused with this line, and that afterwards the engine is idle, its
    pages are accounted for, and it answers as before."""
    with pytest.raises(RuleError) as caught:
        call()
    assert str(caught.value) == line
    assert not llm.engine.busy
    llm.engine.check()
    assert bits(llm) == want


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        (
            None,
            "prompts are a string, a list of token ids, or a list of these; got None (NoneType). "
            "Pass a str, or a list.",
        ),
        (
            7,
            "prompts are a string, a list of token ids, or a list of these; got 7 (int). Pass a "
            "str, or a list.",
        ),
        (
            b"def",
            "prompts are a string, a list of token ids, or a list of these; got b'def' (bytes). "
            "Pass a str, or a list.",
        ),
        (
            {5},
            "prompts are a string, a list of token ids, or a list of these; got {5} (set). Pass a "
            "str, or a list.",
        ),
        (
            {"a": 1},
            "prompts are a string, a list of token ids, or a list of these; got {'a': 1} (dict). "
            "Pass a str, or a list.",
        ),
        (["a", None], f"{PROMPT}; got None (NoneType). Pass a str, or a list."),
        (["a", 5], f"{PROMPT}; got 5 (int). Pass a str, or a list."),
        (["a", b"b"], f"{PROMPT}; got b'b' (bytes). Pass a str, or a list."),
        (["a", {5, 6}], f"{PROMPT}; got {{5, 6}} (set). Pass a str, or a list."),
        (["a", {5: 6}], f"{PROMPT}; got {{5: 6}} (dict). Pass a str, or a list."),
        (["a", []], "a prompt has at least one token; got an empty prompt. Start with some text."),
        (["a", ""], "a prompt has at least one token; got an empty prompt. Start with some text."),
        (["a", [5, None]], f"{IDS}; got None. Use this model's tokenizer."),
        (["a", [5, True]], f"{IDS}; got True. Use this model's tokenizer."),
        (["a", [5, 6.0]], f"{IDS}; got 6.0. Use this model's tokenizer."),
        (["a", [5, "6"]], f"{IDS}; got '6'. Use this model's tokenizer."),
        (["a", [[5, 6]]], f"{IDS}; got [5, 6]. Use this model's tokenizer."),
        (["a", [5, 4096]], f"{IDS}; got 4096. Use this model's tokenizer."),
        (["a", [5, -1]], f"{IDS}; got -1. Use this model's tokenizer."),
        (["a", [5, 10**30]], f"{IDS}; got {10**30}. Use this model's tokenizer."),
        (["a", [5, 10**9999]], f"{IDS}; got an int too long to print. Use this model's tokenizer."),
        ([5, None], f"{IDS}; got None. Use this model's tokenizer."),
        ([5, "a"], f"{IDS}; got 'a'. Use this model's tokenizer."),
        ([1.0, 2.0], f"{IDS}; got 1.0. Use this model's tokenizer."),
        (np.array([1.0, 2.0]), f"{IDS}; got np.float64(1.0). Use this model's tokenizer."),
        (
            ["a", "b\ud800"],
            "a text is valid Unicode; got U+D800, a lone surrogate, at character 1. "
            "Decode it with its own encoding, or with errors='replace'.",
        ),
    ],
    ids=lambda value: format_value(value)[:40],
)
def test_an_invalid_prompt_is_refused_by_generate_and_embed_and_leaves_no_request(
    llm: LLM, want: bytes, prompts: Any, line: str
):
    refused(llm, want, lambda: llm.generate(prompts, FOUR), line)
    refused(llm, want, lambda: llm.embed(prompts), line)


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([5, 6, 7]),
        np.array([5, 6, 7], np.int32),
        torch.tensor([5, 6, 7]),
        (5, 6, 7),
        range(5, 8),
        (i for i in (5, 6, 7)),
        [np.int64(5), np.uint8(6), 7],
        [[5, 6, 7]],
        [np.array([5, 6, 7])],
        np.array([[5, 6, 7]]),
        [torch.tensor([5, 6, 7])],
        (ids for ids in ([5, 6, 7],)),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", format_value(value))[:40],
)
def test_ids_of_any_integer_type_are_the_same_prompt(llm: LLM, prompts: Any):
    (out,) = llm.generate(prompts, FOUR)
    assert out.prompt_token_ids == (5, 6, 7)
    assert all(type(i) is int for i in out.prompt_token_ids)


def test_a_tensor_of_one_id_is_a_prompt_and_not_an_id(llm: LLM):
    outs = llm.generate([torch.tensor([5]), torch.tensor([6, 7])], FOUR)
    assert [out.prompt_token_ids for out in outs] == [(5,), (6, 7)]


def test_a_string_subclass_or_a_numpy_string_is_a_string(llm: LLM, want: bytes):
    (out,) = llm.generate(Text("def fib(n):"), FOUR)
    assert out.logprobs.tobytes() == want
    assert llm.generate(np.array(["def fib(n):"]), FOUR)[0].logprobs.tobytes() == want


def test_an_empty_list_of_prompts_generates_nothing_and_cannot_be_embedded(llm: LLM, want: bytes):
    assert llm.generate([], FOUR) == []
    line = "there is a prompt to embed; got an empty list. Pass at least one."
    refused(llm, want, lambda: llm.embed([]), line)


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        (["a", "b"], "a stream has one prompt; got 2 prompts. Use generate for several."),
        ([], "a stream has one prompt; got 0 prompts. Use generate for several."),
        (
            b"a",
            "prompts are a string, a list of token ids, or a list of these; got b'a' (bytes). Pass "
            "a str, or a list.",
        ),
    ],
)
def test_a_stream_has_one_prompt(llm: LLM, want: bytes, prompt: Any, line: str):
    refused(llm, want, lambda: list(llm.stream(prompt, FOUR)), line)


@pytest.mark.parametrize(
    ("params", "line"),
    [
        (
            {"n": 2},
            "params are SamplingParams, or one for each prompt; got {'n': 2} (dict). Use "
            "SamplingParams().",
        ),
        (
            [FOUR, None],
            "params are SamplingParams, or one for each prompt; got None among them. Use "
            "SamplingParams().",
        ),
        (
            [FOUR, {"n": 2}],
            "params are SamplingParams, or one for each prompt; got {'n': 2} among them. Use "
            "SamplingParams().",
        ),
        (
            [FOUR],
            "there is one SamplingParams for all prompts or one for each; got 1 for 2 prompts. "
            "Match them.",
        ),
    ],
)
def test_params_of_another_class_are_refused(llm: LLM, want: bytes, params: Any, line: str):
    refused(llm, want, lambda: llm.generate(["a", "b"], params), line)


@pytest.mark.parametrize(
    ("items", "line"),
    [
        (
            "ab",
            "items are a list of strings or of lists of token ids; got 'ab' (str). Pass "
            "[item] for one.",
        ),
        (
            [5, 6],
            "items are a list of strings or of lists of token ids; got 5 among them. Pass [item] "
            "for one.",
        ),
        (
            [[5], None],
            "items are a list of strings or of lists of token ids; got None among them. Pass "
            "[item] for one.",
        ),
        (
            {5},
            "items are a list of strings or of lists of token ids; got {5} (set). Pass [item] for "
            "one.",
        ),
        ([[5, None]], f"{IDS}; got None. Use this model's tokenizer."),
        (["a", b"b"], f"{PROMPT}; got b'b' (bytes). Pass a str, or a list."),
    ],
)
def test_an_invalid_item_is_refused(llm: LLM, want: bytes, items: Any, line: str):
    refused(llm, want, lambda: llm.score("def", items), line)


def test_a_refused_batch_does_not_change_a_running_stream(llm: LLM, want: bytes):
    alone = "".join(c.text for c in llm.stream("import", replace(FOUR, max_tokens=9)))
    chunks = llm.stream("import", replace(FOUR, max_tokens=9))
    begun = next(chunks)
    with pytest.raises(RuleError, match=re.escape(IDS)):
        llm.embed(["a", [5, None]])
    with pytest.raises(RuleError, match="at least one token"):
        llm.embed(["a", []])
    llm.engine.check()
    assert len(llm.engine.generations) == 1
    assert begun.text + "".join(c.text for c in chunks) == alone
    llm.engine.check()
    assert bits(llm) == want


def test_a_number_too_long_to_print_is_shown_as_its_type():
    assert format_value(10**9999) == "an int too long to print"
    assert format_value("x" * 200) == "'" + "x" * 76 + "..."
    assert forms.many("a") == ["a"]


# ---- options ----


@pytest.mark.parametrize(
    ("option", "line"),
    [
        *(
            (
                {name: value},
                f"{name} is a whole number from 1 to 2147483647; got {value!r}. Leave it out for "
                "the default.",
            )
            for name in ("page_size", "chunked_prefill_size", "max_running_requests")
            for value in (None, 0, -1, True, "16", 16.0, 2**31, [16], float("nan"))
        ),
        *(
            (
                {name: value},
                f"{name} is a whole number from 1 to 2147483647; got {value!r}. Leave it out for "
                "the default.",
            )
            for name in ("max_total_tokens", "context_length")
            for value in (0, -1, False, "16", 2.5, 2**31)
        ),
        (
            {"page_size": 10**9999},
            "page_size is a whole number from 1 to 2147483647; got an int too long to print. Leave "
            "it out for the default.",
        ),
        *(
            (
                {"mem_fraction_static": value},
                f"mem_fraction_static is a number between 0 and 1; got {value!r}. Leave it "
                "out for the default.",
            )
            for value in ("0.5", True, 0, 1, 1.5, float("nan"), float("inf"), -0.1)
        ),
        (
            {"disable_radix_cache": "no"},
            "disable_radix_cache is True or False; got 'no'. Pass a bool.",
        ),
        (
            {"disable_radix_cache": None},
            "disable_radix_cache is True or False; got None. Pass a bool.",
        ),
        (
            {"kv_cache_dtype": None},
            "kv_cache_dtype is one of auto, float32, bfloat16, float8_e4m3, float16; got None. "
            "Pick one of these.",
        ),
        (
            {"kv_cache_dtype": ["float32"]},
            "kv_cache_dtype is one of auto, float32, bfloat16, float8_e4m3, float16; got "
            "['float32']. Pick one of these.",
        ),
        ({"device": None}, "device is a name; got None. Leave it out for the default."),
        ({"dtype": 32}, "dtype is a name; got 32. Leave it out for the default."),
        (
            {"attention_backend": 5},
            "attention_backend is the name of a backend; got 5. Leave it out for the first that "
            "fits.",
        ),
        (
            {"model": ""},
            "model is a folder or a hub id of the form owner/name; got ''. Leave it out for the "
            "built-in model.",
        ),
        (
            {"model": 5},
            "model is a folder or a hub id of the form owner/name; got 5. Leave it out for the "
            "built-in model.",
        ),
        (
            {"model": b"m"},
            "model is a folder or a hub id of the form owner/name; got b'm'. Leave it out for the "
            "built-in model.",
        ),
    ],
    ids=lambda value: format_value(value)[:40],
)
def test_a_bad_option_is_reported_in_one_line(option: dict[str, Any], line: str):
    with pytest.raises(RuleError) as caught:
        EngineConfig.from_names(option)
    assert str(caught.value) == line


def test_an_option_of_a_numpy_integer_type_becomes_a_python_int():
    config = EngineConfig(page_size=np.int64(16), max_total_tokens=np.int32(64))
    assert (type(config.page_size), type(config.max_total_tokens)) == (int, int)
    assert config == EngineConfig(page_size=16, max_total_tokens=64)


def test_a_suggestion_ends_with_its_question_mark():
    with pytest.raises(RuleError, match=r"Did you mean page_size\?$"):
        EngineConfig.from_names({"page_sise": 4})
    assert str(RuleError("a rule", "b", "Did you mean c?")) == "a rule; got b. Did you mean c?"
    assert str(RuleError("a rule", "b", "Use c")) == "a rule; got b. Use c."


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"stop": ["\ud800"]},
            "a stop is valid Unicode; got '\\ud800', with a lone surrogate. No text has one: leave "
            "it out.",
        ),
        (
            {"seed": 10**9999},
            f"seed is a whole number from {-(2**63)} to {2**63 - 1}; got an int too long to print. "
            "Use None for a seed of its own.",
        ),
        (
            {"top_k": np.float32(3)},
            f"top_k is a whole number from -1 to {MAX_VOCAB}; got np.float32(3.0). Use 0 or -1 to "
            "keep every token.",
        ),
        (
            {"logit_bias": {1: float("inf")}},
            "logit_bias of token 1 is a number from -100.0 to 100.0; got inf. Use -100 to all but "
            "forbid a token.",
        ),
        (
            {"max_tokens": True},
            "max_tokens is a whole number from 1 to 16777216; got True. Use None for as many as "
            "the context leaves.",
        ),
        (
            {"stop_token_ids": [None]},
            f"a stop token id is a whole number from 0 to {MAX_VOCAB - 1}; got None. Use ids of "
            "the model's tokenizer.",
        ),
        (
            {"stop_token_ids": 5},
            "stop_token_ids is a list of at most 1024 token ids; got 5. Pass a list.",
        ),
        ({"stop": b"x"}, "stop is a list of at most 16 strings; got b'x'. Pass a list."),
        ({"temprature": 1}, None),
    ],
    ids=lambda value: format_value(value)[:40],
)
def test_a_bad_parameter_is_reported_in_one_line(given: dict[str, Any], line: str | None):
    with pytest.raises(RuleError) as caught:
        SamplingParams.from_dict(given)
    assert (
        str(caught.value) == line
        if line
        else str(caught.value).endswith("got 'temprature'. Did you mean temperature?")
    )


@pytest.mark.parametrize(
    ("option", "match"),
    [
        (
            {"max_total_tokens": 2**31 - 1},
            r"^the cache fits into its device's memory of [\d,]+ B; got [\d,]+ B for "
            r"2,147,483,647 tokens",
        ),
        (
            {"page_size": 2**31 - 1},
            r"^the cache fits into its device's memory of [\d,]+ B; got [\d,]+ B for [\d,]+ "
            r"pages of 2,147,483,647",
        ),
        (
            {"model": "a" * 5000},
            r"^a model is a folder or a hub id of the form owner/name; got 'a{76}\.\.\.\. Check "
            r"the path\.$",
        ),
        (
            {"model": "a\0b"},
            r"^a model is a folder or a hub id of the form owner/name; got 'a\\x00b'\. Check the "
            r"path\.$",
        ),
    ],
    ids=lambda value: format_value(value)[:40],
)
def test_a_cache_too_large_or_an_invalid_model_is_refused(option: dict[str, Any], match: str):
    with pytest.raises(RuleError, match=match):
        LLM(**option)


# ---- values of other libraries, and of classes that fail ----


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value", [np.array([1, 2]), torch.tensor([1.5]), Unprintable(), np.zeros((2, 2))]
)
@pytest.mark.parametrize(
    "option", ["page_size", "context_length", "kv_cache_dtype", "dtype", "device"]
)
def test_an_option_that_is_an_array_or_cannot_be_printed_is_refused_on_one_line(option, value):
    with pytest.raises(RuleError) as caught:
        EngineConfig.from_names({option: value})
    assert option in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["stop", "stop_token_ids"])
@pytest.mark.parametrize("value", [np.array(3), torch.tensor(3)])
def test_a_zero_dimensional_array_is_refused_as_a_list_of_stops(option, value):
    with pytest.raises(RuleError, match=f"{option} is a list of at most"):
        SamplingParams(**{option: value})


def test_arguments_of_engine_methods_and_on_done_are_checked_too(llm, want):
    add, items = llm.engine.add, llm.engine.add_items
    rule = "params are SamplingParams, or one for each prompt; got 5 (int). Use SamplingParams()."
    refused(llm, want, lambda: add([1], 5), rule)
    rule = (
        "items are a list of strings or of lists of token ids; got None (NoneType). Pass [item] "
        "for one."
    )
    refused(llm, want, lambda: items([1], None), rule)
    rule = "on_done is called without arguments; got 5. Pass a function, or leave it out."
    refused(llm, want, lambda: llm.generate("a", FOUR, 5), rule)
    job = add([1])
    llm.engine.abort(job)
    assert job.params.max_tokens == SamplingParams().max_tokens


def test_a_context_length_beyond_the_models_is_refused_and_not_shortened():
    with pytest.raises(
        RuleError,
        match=r"context_length is at most the model's 2048 positions; got 4000\. Leave it out, or "
        r"lower it\.",
    ):
        LLM(context_length=4000, max_total_tokens=64)


@pytest.mark.parametrize(
    "prompts", [range(10**9), [range(2**40)], range(10**30)], ids=["prompts", "ids", "huge"]
)
def test_too_many_prompts_or_ids_are_refused_before_they_are_expanded(llm: LLM, prompts: Any):
    with pytest.raises(RuleError, match=r"has at most 67,108,864 entries; got .*range\(0, 1"):
        llm.generate(prompts)


def test_bucket_sizes_too_far_apart_for_a_models_positions_are_refused():
    """A pad request had 176 rows where the model has 160 positions: every step failed."""
    sizes = {"chunked_prefill_size": 256, "max_running_requests": 2, "max_total_tokens": 1000}
    made = tiny.parts(tiny.BART, select.load("cpu"))
    for bucket_sizes in ((1, 2, 64, 256), (256,)):
        config = EngineConfig(bucket_sizes=bucket_sizes, **sizes)
        with pytest.raises(RuleError, match="at most the model's 160 positions; got up to"):
            Engine(config, made)
    engine = Engine(EngineConfig(bucket_sizes=(1, 2, 64, 128, 256), **sizes), made)
    job = engine.add(tiny.words(80))
    while engine.busy:
        engine.step()
    assert job.output("").completions[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"ignore_eos": 10**5000}, "ignore_eos is True or False; got an int too long to print"),
        ({"stop": range(10**30)}, "stop is a list of at most 16 strings; got range"),
        ({"stop_token_ids": range(10**30)}, "stop_token_ids is a list of at most 1024"),
    ],
)
def test_a_value_that_cannot_be_printed_or_listed_is_refused(given, rule):
    with pytest.raises(RuleError, match=rule):
        SamplingParams(**given)


def test_options_are_given_by_name():
    for kind in (EngineConfig.from_names, SamplingParams.from_dict):
        with pytest.raises(RuleError, match=r"has a name; got 5\. Pass a dict\."):
            kind(5)
