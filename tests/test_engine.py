"""The whole engine: an answer is a function of model, prompt, parameters and seed, and of nothing
else.

Small models, real files, real pages. The oracle is the request's lone run, without a cache and
without other requests.
"""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
import tiny_engine
import torch

from lockstep import LLM, SamplingParams
from lockstep.attention.select import select
from lockstep.config import EngineConfig
from lockstep.lab import fuzz
from lockstep.llm.engine import BUILTIN, Engine
from lockstep.llm.output import Output
from lockstep.run.kind import GENERATE
from lockstep.types import RuleError

TRACES = 320


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("block", range(16))
def test_every_request_of_a_random_trace_has_the_bits_of_its_lone_run(block):
    each = TRACES // 16
    happened = fuzz.Counter()
    for seed in range(block * each, (block + 1) * each):
        faults, counts = fuzz.play(seed)
        assert not faults, faults[:3]
        happened.update(counts)
    assert happened["traces"] == each
    assert happened["hit_tokens"] > 0
    assert happened["forked"] > 0


def test_an_unreferenced_engine_and_its_step_memory_are_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        engine = tiny_engine.engine()
        LLM.of(engine).generate([[3, 4, 5]], SamplingParams(max_tokens=3))
        left = [ref(engine.runner.arena.buffer), ref(engine.runner.pools[0])]
        del engine
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()


def test_traces_with_a_small_cache_preempt_requests():
    happened = fuzz.Counter()
    for seed in (
        s
        for s in range(TRACES)
        if fuzz.draw(s).config.max_total_tokens == 112 and len(fuzz.draw(s).orders) > 9
    ):
        faults, counts = fuzz.play(seed)
        assert not faults, faults[:3]
        happened.update(counts)
    assert happened["preempted"] > 0


def run(engine: Engine, prompt, params) -> Output:
    job = engine.add(prompt, params)
    while engine.busy:
        engine.step()
    engine.check()
    return job.output("")


PROMPT = tuple(range(1, 40))
PARAMS = SamplingParams(max_tokens=20, temperature=0.8, seed=5, logprobs=3)


def same(a: Output, b: Output) -> bool:
    return (
        a.token_ids == b.token_ids
        and a.logprobs.tobytes() == b.logprobs.tobytes()
        and a.top_logprobs == b.top_logprobs
    )


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_a_cache_hit_has_the_bits_of_a_miss_at_page_boundaries(page_size, length):
    engine = tiny_engine.engine(page_size=page_size, max_total_tokens=2000)
    prompt = PROMPT[:length]
    cold, warm = run(engine, prompt, PARAMS), run(engine, prompt, PARAMS)
    assert same(cold, warm)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == (length - 1) // page_size * page_size


@pytest.mark.parametrize("chunk", [1, 7, 16, 39, 512])
def test_any_chunk_size_gives_the_same_bits(chunk):
    want = run(tiny_engine.engine(max_total_tokens=2000), PROMPT, PARAMS)
    assert same(
        run(tiny_engine.engine(max_total_tokens=2000, chunked_prefill_size=chunk), PROMPT, PARAMS),
        want,
    )


def test_preemption_every_two_steps_changes_nothing():
    want = run(tiny_engine.engine(max_total_tokens=2000), PROMPT, PARAMS)
    engine = tiny_engine.engine(max_total_tokens=2000, disable_radix_cache=True)
    job, steps = engine.add(PROMPT, PARAMS), 0
    while engine.busy:
        engine.step()
        steps += 1
        if steps % 2 == 0 and job.request.running:
            engine.scheduler._preempt(job.request)
    assert engine.scheduler.counters["preempted"] > 5
    assert same(job.output(""), want)
    engine.check()


def test_n_completions_have_the_bits_of_n_requests():
    engine = tiny_engine.engine(max_total_tokens=2000)
    three = run(engine, PROMPT, replace(PARAMS, n=3))
    assert len({c.token_ids for c in three.completions}) > 1
    for completion in three.completions:
        alone = run(engine, PROMPT, replace(PARAMS, sample_index=completion.index))
        assert alone.token_ids == completion.token_ids
        assert alone.logprobs.tobytes() == completion.logprobs.tobytes()


def test_scores_have_the_bits_of_generation():
    engine = tiny_engine.engine(max_total_tokens=2000)
    out = run(engine, PROMPT, PARAMS)
    job = engine.add(
        (*PROMPT, *out.token_ids), SamplingParams(prompt_logprobs=True, seed=0), scores_only=True
    )
    while engine.busy:
        engine.step()
    scores = job.output("").prompt_logprobs
    assert np.isnan(scores[0])
    assert scores[len(PROMPT) :].tobytes() == out.logprobs.tobytes()


def test_an_aborted_neighbour_changes_no_bit_of_a_request():
    engine = tiny_engine.engine(max_total_tokens=2000)
    want = run(tiny_engine.engine(max_total_tokens=2000), PROMPT, PARAMS)
    job, other = engine.add(PROMPT, PARAMS), engine.add(PROMPT[:20], PARAMS)
    for _ in range(4):
        engine.step()
    engine.abort(other)
    while engine.busy:
        engine.step()
    assert same(job.output(""), want)
    assert other.output("").finish_reason == "abort"
    engine.check()


def test_nan_logits_end_their_request_and_nothing_else():
    engine = tiny_engine.engine(max_total_tokens=2000)
    want = run(tiny_engine.engine(max_total_tokens=2000), PROMPT, PARAMS)
    poison = next(t for t in range(40, 61) if t not in want.token_ids)
    kind = engine.kinds[GENERATE]

    def poisoned(ids, positions, step):
        """Makes the hidden state of one token NaN; only the other request has that token."""
        hidden = kind.forward(ids, positions, step).clone()
        hidden[ids == poison] = torch.nan
        return hidden

    engine.kinds[GENERATE] = replace(kind, forward=poisoned)
    bad, good = engine.add((*PROMPT[:9], poison), PARAMS), engine.add(PROMPT, PARAMS)
    while engine.busy:
        engine.step()
    (completion,) = bad.output("").completions
    assert (completion.finish_reason, completion.error) == ("error", "a logit is NaN")
    assert same(good.output(""), want)
    engine.check()


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ((), PARAMS, "at least one token"),
        ((1, 61), PARAMS, "from 0 to 60; got 61"),
        ((1, -1), PARAMS, "from 0 to 60; got -1"),
        ((1, True), PARAMS, "whole number from 0 to 60; got True"),
        ((1,) * 200, PARAMS, "at most 160 tokens; got 200"),
        ((1,) * 150, PARAMS, r"context of 160; got 150 \+ 20. Use max_tokens of at most 10"),
        ((1,), replace(PARAMS, logit_bias={61: 1.0}), "logit_bias names tokens from 0 to 60"),
        ((1,), replace(PARAMS, stop_token_ids=(99,)), "stop_token_ids"),
        ((1,), replace(PARAMS, stop_token_ids=(61,)), "stop_token_ids"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_is_right(prompt, params, match):
    engine = tiny_engine.engine(max_total_tokens=2000)
    with pytest.raises(RuleError, match=match):
        engine.add(prompt, params)
    assert same(
        run(engine, PROMPT, PARAMS), run(tiny_engine.engine(max_total_tokens=2000), PROMPT, PARAMS)
    )


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"page_sise": 4}, "Did you mean page_size"),
        ({"page_size": 0}, "page_size is a whole number from 1"),
        ({"mem_fraction_static": 1.5}, "between 0 and 1"),
        ({"max_total_tokens": 2.5}, "whole number"),
        ({"kv_cache_dtype": "int8"}, "is one of auto, float32"),
    ],
)
def test_a_bad_option_is_a_clear_error(option, match):
    with pytest.raises(RuleError, match=match):
        EngineConfig.from_names(option)


def test_a_request_that_never_fits_the_pool_is_refused_with_both_numbers():
    engine = tiny_engine.engine(max_total_tokens=32)
    with pytest.raises(RuleError, match=r"group \d has 2 pages of 16; got 58 keys, which need 4"):
        engine.add(PROMPT, PARAMS)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_total_tokens=8192, context_length=1024)


def test_the_built_in_model_generates_text_with_a_certified_fingerprint(llm):
    (out,) = llm.generate(
        "def binary_search(items, target):\n",
        SamplingParams(max_tokens=48, temperature=0, logprobs=True),
    )
    assert "    " in out.text
    assert out.text == llm.engine.tokenizer.decode(out.token_ids)
    assert len(out.logprobs) == len(out.token_ids)
    assert "order=canonical;backend=cpu" in out.fingerprint
    assert "certificate=" in out.fingerprint and "certificate=none" not in out.fingerprint


def test_the_text_of_an_output_is_that_of_its_first_completion(llm):
    (out,) = llm.generate("def", SamplingParams(max_tokens=8, temperature=1.0, seed=1, n=3))
    texts = [each.text for each in out.completions]
    assert out.text == texts[0] and len({*texts}) == 3, texts


def test_a_stream_yields_the_text_and_tokens_of_generate(llm):
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=1, stop=["return"])
    (out,) = llm.generate("def add(a, b):\n", params)
    chunks = list(llm.stream("def add(a, b):\n", params))
    assert "".join(c.text for c in chunks) == out.text
    assert sum((c.token_ids for c in chunks), ()) == out.token_ids
    assert chunks[-1].finish_reason == out.finish_reason
    assert "return" not in out.text


def test_an_abandoned_stream_frees_its_pages(llm):
    for _ in llm.stream("import os\n", SamplingParams(max_tokens=64, seed=0)):
        break
    assert not llm.engine.busy
    llm.engine.check()


def test_scoring_and_embedding_texts(llm):
    scores = llm.score("import os\nimport sys\n")
    assert np.isnan(scores[0])
    assert (scores[1:] < 0).all()
    vectors = llm.embed(["import os", "import os", "class Stack:"])
    assert vectors.dtype == np.float32
    assert np.allclose((vectors**2).sum(1), 1, atol=1e-5)
    assert vectors[0].tobytes() == vectors[1].tobytes()
    assert llm.embed(["import os"])[0].tobytes() == vectors[0].tobytes()


def test_one_bad_prompt_refuses_the_whole_batch_and_leaves_no_request(llm):
    with pytest.raises(RuleError, match="at most 1024 tokens; got 5000"):
        llm.generate(["import os", [5] * 5000], SamplingParams(max_tokens=4, seed=0))
    assert not llm.engine.busy
    llm.engine.check()


def test_the_built_in_model_is_small():
    weights = BUILTIN / "model.safetensors"
    assert sum(f.stat().st_size for f in Path(BUILTIN).iterdir()) <= 16 * 2**20
    assert weights.stat().st_size <= 2 * 8_000_000 + 65536


def test_the_built_in_config_states_every_field_that_transformers_would_default():
    """Lockstep reads config.json directly, so that a first token does not wait for transformers. So
    no field may depend on a default of transformers."""
    from transformers import AutoConfig

    from lockstep.models import qwen3

    raw = json.loads((BUILTIN / "config.json").read_text())
    assert qwen3.describe(SimpleNamespace(**raw)) == qwen3.describe(
        AutoConfig.from_pretrained(BUILTIN)
    )


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    from transformers import BartConfig, BartForConditionalGeneration

    folder = tmp_path_factory.mktemp("bart")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "max_position_embeddings": 96,
    }
    heads = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "init_std": 0.4,
    }
    model = BartForConditionalGeneration(BartConfig(**sizes, **heads)).eval()
    model.save_pretrained(folder)
    return model, LLM(str(folder), max_total_tokens=2000)


def test_an_encoder_decoder_answers_like_transformers(bart):
    model, llm = bart
    sources = [[int(i) for i in np.random.default_rng(n).integers(3, 64, n)] for n in (5, 31, 12)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=True)
    for source, out in zip(sources, llm.generate(sources, params), strict=True):
        with torch.no_grad():
            ids = torch.tensor([[2, *out.token_ids]])
            want = (
                model(torch.tensor([source]), decoder_input_ids=ids).logits[0, :-1].log_softmax(-1)
            )
        assert want.argmax(-1).tolist() == list(out.token_ids)
        assert np.abs(want.max(-1).values.numpy() - out.logprobs).max() < 1e-4
        assert out.prompt_token_ids == tuple(source)
        assert same_bits(llm.generate([source], params)[0].logprobs, out.logprobs)


def same_bits(a, b) -> bool:
    return a.tobytes() == b.tobytes()


def test_items_of_an_encoder_decoder_are_scored_as_its_targets(bart):
    _, llm = bart
    source = [7, 8, 9]
    (out,) = llm.generate(
        [source], SamplingParams(max_tokens=9, temperature=0.7, seed=1, logprobs=True)
    )
    first, second = llm.score(source, [out.token_ids, [5, 6]])
    assert same_bits(first, out.logprobs)
    assert len(second) == 2
    with pytest.raises(RuleError, match="a prompt is scored by a decoder"):
        llm.score(source)
    with pytest.raises(RuleError, match="embeddings"):
        llm.embed([source])


def test_items_are_forks_of_one_prompt():
    llm = LLM(max_total_tokens=4000)
    text = "def fib(n):\n    "
    items = ["return n", "if n < 2:\n        return n", "r"]
    told = llm.score(text, items)
    assert (
        llm.engine.scheduler.counters["forked"] == 2 - 1
    )  # the first item continues the prompt's own request; an item of one token needs no row
    ids = llm.engine.tokenizer.encode(text)
    for item, scores in zip(items, told, strict=True):
        own = llm.engine.tokenizer.encode(item, False)
        assert same_bits(llm.score([*ids, *own])[len(ids) :], scores)
    llm.engine.check()


@pytest.mark.parametrize(
    ("items", "rule"),
    [
        ([], r"there is an item.*got 0 items, \d+ \+ 0 tokens"),
        ([[]], "at least one token"),
        ([[1], [4096]], "a token id is a whole number"),
        ([[5] * 2048], "fit into the context"),
    ],
)
def test_bad_items_are_refused_and_the_next_request_is_right(items, rule):
    llm = LLM(max_total_tokens=4000)
    want = llm.generate("def", SamplingParams(max_tokens=4, temperature=0))[0].token_ids
    with pytest.raises(RuleError, match=rule):
        llm.score("def", items)
    assert llm.generate("def", SamplingParams(max_tokens=4, temperature=0))[0].token_ids == want


def test_a_stop_string_completed_by_the_end_of_the_text_is_a_stop():
    """A byte that is no character becomes text only when no token follows. The reason used to be
    the length."""
    from lockstep.lab.tiny import LLAMA, parts

    engine = Engine(EngineConfig(max_total_tokens=2000), parts(LLAMA, select("cpu", [], "cpu")[0]))
    letters = engine.tokenizer
    half = letters.TOKENS.index("é".encode()[:1])
    out = run(
        engine,
        (3,),
        SamplingParams(max_tokens=1, temperature=0, logit_bias={half: 100}, stop="\ufffd"),
    )
    assert (out.token_ids, out.text, out.finish_reason) == ((half,), "", "stop")
