"""Every model against transformers' own class, with random weights that make attention, windows,
sinks and routing matter.

Values: logits within 1e-4 of the reference (eager attention, float32), whole, in chunks, after a
cached prefix, with pages of 1 and 16 tokens; 64 greedy tokens; embeddings. Bits: a request alone
and in a batch, whole and in chunks, with different page sizes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import Engine, Request, randomise
from torch import Tensor

from lockstep.config import EngineConfig
from lockstep.llm.api import LLM
from lockstep.models.loader import load, model_types
from lockstep.run.kind import EMBED
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VOCAB = 200
CLOSE = 2e-4  # a reference whose best two logits are closer than this may go either way
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MLA: dict[str, Any] = {
    **{
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
    },
    **{
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LLAMA3 = {
    **{
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "original_max_position_embeddings": 64,
}
# config class, model class, what differs from SMALL
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 9}),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **{"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            **MLA,
            **{
                "q_lora_rank": None,
                "n_shared_experts": 2,
                "topk_method": "group_limited_greedy",
                "routed_scaling_factor": 1.5,
            },
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**MLA, "q_lora_rank": 40, "n_shared_experts": 1, "attention_bias": True},
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            **{
                "d_model": 64,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_ffn_dim": 96,
                "decoder_ffn_dim": 80,
            },
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 8, "scale_embedding": True},
        },
    ),
    "bert": ("BertConfig", "BertModel", {}),
}
DECODERS = [name for name in CASES if name not in ("bart", "bert")]


@dataclass(frozen=True)
class Case:
    """A tiny model twice: transformers' and Lockstep's."""

    reference: Any
    model: Any
    folder: Path

    def logits(self, ids: list[int]) -> Tensor:
        with torch.no_grad():
            return self.reference(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    return make(*CASES[request.param], tmp_path_factory.mktemp(request.param))


def make(
    config_class: str,
    model_class: str,
    changes: dict[str, Any],
    folder: Path,
    context: int | None = None,
    **saving: Any,
) -> Case:
    """Returns transformers' model with random weights, saved by transformers and loaded by Lockstep
    for a context of this length."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes = {
        k: v
        for k, v in SMALL.items()
        if k in ("vocab_size", "max_position_embeddings") or config_class != "BartConfig"
    }
    config = getattr(transformers, config_class)(**{**sizes, **changes})
    config._attn_implementation = "eager"
    reference = randomise(getattr(transformers, model_class)(config))
    reference.save_pretrained(folder, **saving)
    options = EngineConfig(device="cpu", context_length=context)
    return Case(reference, load(folder, options).model, folder)


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def agree(ours: Tensor, theirs: Tensor) -> None:
    assert torch.isfinite(ours).all()
    assert theirs.abs().max() > 1, "a reference that says nothing"
    assert (ours - theirs).abs().max().item() <= 1e-4


def greedy(
    case: Case, engine: Engine, request: Request, hidden: Tensor, count: int = 64
) -> list[int]:
    """Returns `count` greedy tokens, one step each, starting at the last row of a prompt."""
    out: list[int] = []
    for _ in range(count):
        out.append(int(case.model.logits(hidden[-1:]).argmax()))
        hidden = engine.step([(request, [out[-1]])])
    return out


def check_greedy(chosen: list[int], logits: Tensor) -> int:
    """Checks that every token is the reference's own choice at its place. Returns how many places
    were too close to call."""
    best = logits.topk(2, -1)
    exempt = 0
    for token, (first, second), (choice, _) in zip(
        chosen, best.values.tolist(), best.indices.tolist(), strict=True
    ):
        if first - second < CLOSE:
            exempt += 1
        else:
            assert token == choice
    return exempt


def test_there_is_a_case_for_every_model_type():
    assert sorted(CASES) == model_types()


@pytest.mark.parametrize("case", DECODERS, indirect=True)
def test_logits_are_those_of_transformers_whole_chunked_and_with_any_page_size(case):
    prompt = tokens(61)
    want = case.logits(prompt)
    hidden = {}
    for page_size in (16, 1):
        engine = Engine(case.model, page_size)
        hidden[page_size] = engine.whole(prompt)
        agree(case.model.logits(hidden[page_size]), want)
        parent = engine.request()
        chunked = engine.whole(prompt, 7, parent)
        assert torch.equal(chunked, hidden[page_size]), "whole and chunked differ in bits"
    assert torch.equal(hidden[1], hidden[16]), "the page size changes bits"


@pytest.mark.parametrize("case", DECODERS, indirect=True)
def test_a_cached_prefix_changes_neither_values_nor_bits(case):
    shared, other = tokens(40), tokens(15, seed=1)
    engine = Engine(case.model, 4)
    parent = engine.request()
    engine.whole(shared[:37], None, parent)
    child = engine.fork(parent, 37)
    engine.whole(tokens(9, seed=2), 3, parent)  # the parent continues differently
    rest = shared[37:] + other
    warm = engine.whole(rest, None, child)
    cold = Engine(case.model).whole(shared + other)[37:]
    assert torch.equal(warm, cold)
    agree(case.model.logits(warm), case.logits(shared + other)[37:])


@pytest.mark.parametrize("case", DECODERS, indirect=True)
def test_64_greedy_tokens_are_those_of_transformers(case):
    prompt = tokens(31, seed=4)
    engine = Engine(case.model)
    request = engine.request()
    chosen = greedy(case, engine, request, engine.whole(prompt, 16, request))
    exempt = check_greedy(chosen, case.logits(prompt + chosen)[len(prompt) - 1 : -1])
    assert len(set(chosen)) > 3, "a model that repeats itself proves nothing"
    assert exempt <= 6


@pytest.mark.parametrize("case", DECODERS, indirect=True)
def test_a_request_alone_and_in_a_batch_has_the_same_bits(case):
    prompts = [tokens(n, seed=n) for n in (1, 33, 14, 5)]
    engine = Engine(case.model)
    requests = [engine.request() for _ in prompts]
    together = engine.step(list(zip(requests, prompts))).split([len(p) for p in prompts])
    for prompt, rows in zip(prompts, together):
        assert torch.equal(Engine(case.model).whole(prompt), rows)
    decoded = engine.step([(r, [7 + i]) for i, r in enumerate(requests)])
    alone = Engine(case.model).whole([*prompts[1], 8])
    assert torch.equal(decoded[1], alone[-1]), "decode in a batch and prefill alone differ in bits"
    torch.set_num_threads(2)
    try:
        assert torch.equal(Engine(case.model).whole(prompts[1]), together[1]), (
            "the thread count changes bits"
        )
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("case", DECODERS, indirect=True)
def test_embeddings_of_decoders_are_those_of_transformers(case):
    prompts = [tokens(n, seed=n) for n in (12, 40, 1)]
    engine = Engine(case.model)
    for how in ("last", "mean"):
        got = engine.embed(prompts, how)
        for i, prompt in enumerate(prompts):
            with torch.no_grad():
                rows = case.reference.model(torch.tensor([prompt])).last_hidden_state[0]
            want = torch.nn.functional.normalize(rows[-1] if how == "last" else rows.mean(0), dim=0)
            assert (got[i] - want).abs().max() <= 1e-5
            assert torch.equal(engine.embed([prompt], how)[0], got[i])
            assert torch.equal(
                case.model.embed(engine.whole(prompt), [0, len(prompt)], how)[0], got[i]
            ), "the cache changes bits"


@pytest.mark.parametrize("case", ["bert"], indirect=True)
def test_embeddings_of_bert_are_those_of_transformers(case):
    prompts = [tokens(n, seed=n) for n in (12, 40, 1)]
    got = Engine(case.model).embed(prompts)
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            rows = case.reference(torch.tensor([prompt])).last_hidden_state[0]
        assert (got[i] - torch.nn.functional.normalize(rows.mean(0), dim=0)).abs().max() <= 1e-5
        assert torch.equal(Engine(case.model).embed([prompt])[0], got[i])


@pytest.mark.parametrize("case", ["bart"], indirect=True)
@pytest.mark.parametrize("page_size", [1, 16])
def test_states_logits_and_tokens_of_bart_are_those_of_transformers(case, page_size):
    sources, prompt = [tokens(n, seed=n) for n in (23, 5)], [2, *tokens(30, seed=5)]
    engine = Engine(case.model, page_size)
    requests = [engine.request() for _ in sources]
    rows = engine.encode(list(zip(requests, sources))).split([len(s) for s in sources])
    for source, request, encoded in zip(sources, requests, rows):
        with torch.no_grad():
            want = case.reference(torch.tensor([source]), decoder_input_ids=torch.tensor([prompt]))
        assert (encoded - want.encoder_last_hidden_state[0]).abs().max() <= 1e-4
        whole = engine.whole(prompt, 7, request)
        agree(case.model.logits(whole), want.logits[0])
        alone = Engine(case.model)
        single = alone.request()
        assert torch.equal(alone.encode([(single, source)]), encoded)
        assert torch.equal(alone.whole(prompt, None, single), whole)
        chosen = greedy(case, engine, request, whole)
        with torch.no_grad():
            ids = torch.tensor([prompt + chosen])
            again = case.reference(torch.tensor([source]), decoder_input_ids=ids).logits[0]
        assert check_greedy(chosen, again[len(prompt) - 1 : -1]) <= 6
        assert len(set(chosen)) > 3, "a model that repeats itself proves nothing"


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
BOTH = {"sliding_attention": PLAIN, "full_attention": DYNAMIC}
VARIANTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama, tied, sharded, heads wider than the rows": (
        *CASES["llama"][:2],
        {"tie_word_embeddings": True, "head_dim": 24},
        {"max_shard_size": "20KB"},
    ),
    "llama, yarn": (*CASES["llama"][:2], {"rope_parameters": YARN}, {}),
    "llama, dynamic, not stretched": (*CASES["llama"][:2], {"rope_parameters": DYNAMIC}, {}),
    "llama, dynamic, stretched": (
        *CASES["llama"][:2],
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 26},
        {"context": 52},
    ),
    "llama, a part of a head": (
        *CASES["llama"][:2],
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        {},
    ),
    "gemma3_text, dynamic, stretched": (
        *CASES["gemma3_text"][:2],
        {**CASES["gemma3_text"][2], "rope_parameters": BOTH, "max_position_embeddings": 26},
        {"context": 52},
    ),
    "qwen3, windows": (
        *CASES["qwen3"][:2],
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "attention_bias": True,
        },
        {},
    ),
    "qwen3_moe, every other layer, not normed, windows": (
        *CASES["qwen3_moe"][:2],
        {
            **CASES["qwen3_moe"][2],
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
        {},
    ),
    "gemma2, untied, no caps": (
        *CASES["gemma2"][:2],
        {
            "head_dim": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
        {},
    ),
    "deepseek_v2, greedy, low-rank queries": (
        *CASES["deepseek_v2"][:2],
        {**MLA, "q_lora_rank": 40, "topk_method": "greedy", "mlp_bias": True},
        {},
    ),
    "deepseek_v3, halves, one group, yarn": (
        *CASES["deepseek_v3"][:2],
        {
            **MLA,
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**YARN, "mscale_all_dim": 1.0},
        },
        {},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_config_variants_are_those_of_transformers(name, tmp_path):
    config_class, model_class, changes, saving = VARIANTS[name]
    variant = make(config_class, model_class, changes, tmp_path, **saving)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or "max_shard_size" not in saving
    prompt = tokens(
        52
    )  # transformers stretches a rope like this only if it runs the whole context in one step
    agree(variant.model.logits(Engine(variant.model).whole(prompt)), variant.logits(prompt))
    assert variant.model.max_position == saving.get("context", 512)


FAR = 131_071


@dataclass(frozen=True)
class Placed:
    """A model whose row p is computed at positions[p]."""

    model: Any
    positions: Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, ids: Tensor, positions: Tensor, step: Any) -> Tensor:
        return self.model(ids, self.positions[positions], step)


@contextmanager
def our_frequencies(case: Case) -> Iterator[None]:
    """Gives transformers our frequencies, which differ from its own by one or two units in the last
    place of float32."""
    buffers = [
        (module, name, value)
        for module in case.reference.modules()
        for name, value in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]
    known = [torch.tensor(block.attn.rope.inv_freq) for block in case.model.spec.blocks]
    try:
        for module, name, value in buffers:
            ours = min(known, key=lambda freqs: (freqs - value).abs().max().item())
            assert ours.allclose(value, rtol=1e-6, atol=0)
            setattr(module, name, ours)
        yield
    finally:
        for module, name, value in buffers:
            setattr(module, name, value)


@pytest.mark.parametrize("case", DECODERS, indirect=True)
def test_logits_are_those_of_transformers_up_to_position_131071(case):
    """The last 61 positions of a long context; then half of the rows there and half at its
    beginning. At 131,071 a unit in the last place of a frequency is an angle of up to 0.008, so
    transformers is given our frequencies."""
    prompt = tokens(61)
    near, far = torch.arange(61), torch.arange(FAR - 60, FAR + 1)
    apart = torch.cat((near[:30], far[30:]))

    def theirs(positions: Tensor) -> Tensor:
        with torch.no_grad():
            mask = torch.ones(
                1, 61, dtype=torch.long
            )  # without a mask, positions that jump are read as several prompts
            return case.reference(
                torch.tensor([prompt]), position_ids=positions[None], attention_mask=mask
            ).logits[0]

    ours = [
        case.model.logits(Engine(Placed(case.model, positions)).whole(prompt, 16))
        for positions in (near, far, apart)
    ]
    agree(ours[0], theirs(near))
    agree(ours[1], theirs(far))
    with our_frequencies(case):
        agree(ours[2], theirs(apart))
    windows = all(
        block.attn.window is not None and block.attn.window < 12 for block in case.model.spec.blocks
    )
    assert windows or (ours[0] - ours[2])[40:].abs().max() > 1e-2, "a distance of 131,071 matters"


def test_a_context_length_stretches_a_dynamic_rope_and_is_named_in_the_fingerprint(tmp_path):
    """max_position is 26: 52 tokens are those of transformers, run whole; without a context length
    27 are too many."""
    from lockstep import LLM

    changes = {"rope_parameters": DYNAMIC, "max_position_embeddings": 26}
    variant = make(*CASES["llama"][:2], changes, tmp_path)
    options = {"max_total_tokens": 256, "chunked_prefill_size": 16}
    plain, long, other = (LLM(str(tmp_path), context_length=n, **options) for n in (None, 52, 40))
    assert [llm.engine.context_length for llm in (plain, long, other)] == [26, 52, 40]
    assert "rope_context" not in plain.fingerprint
    assert ";rope_context=52" in long.fingerprint and ";rope_context=40" in other.fingerprint
    assert LLM(str(tmp_path), context_length=20, **options).fingerprint == plain.fingerprint
    with pytest.raises(RuleError, match="at most 26 tokens; got 27"):
        plain.score(tokens(27))
    for llm, prompt in ((plain, tokens(26)), (long, tokens(52))):
        scores = torch.log_softmax(variant.logits(prompt), -1)[:-1].gather(
            1, torch.tensor(prompt[1:])[:, None]
        )[:, 0]
        assert (torch.from_numpy(llm.score(prompt)[1:]) - scores).abs().max() <= 1e-4


def test_a_bart_whose_config_denies_its_encoder_runs_its_encoder_nevertheless(tmp_path):
    """It used to be taken for a decoder, and failed in its first step."""
    make(*CASES["bart"], tmp_path)
    answers, config = [], json.loads((tmp_path / "config.json").read_text())
    for said in (True, False):
        (tmp_path / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": said}))
        llm = LLM(model=str(tmp_path), device="cpu")
        (out,) = llm.generate([tokens(23)], SamplingParams(max_tokens=9, temperature=0.0))
        answers.append(out.token_ids)
    assert answers[0] == answers[1] and len(answers[0]) == 9


def test_a_masked_language_model_embeds_with_its_encoder(tmp_path):
    """Names begin with "bert.", and a head that embeddings do not need is ignored."""
    variant = make("BertConfig", "BertForMaskedLM", {}, tmp_path)
    with torch.no_grad():
        rows = variant.reference.bert(torch.tensor([tokens(9)])).last_hidden_state[0]
    got = Engine(variant.model).embed([tokens(9)], "first")[0]
    assert (got - torch.nn.functional.normalize(rows[0], dim=0)).abs().max() <= 1e-5
    with pytest.raises(RuleError, match="Use it for embeddings"):
        variant.model.logits(rows)


def test_a_trunk_without_a_head_embeds_and_does_not_generate(tmp_path):
    """Embedding checkpoints are saved without "model." in their names and without lm_head."""
    variant = make("Qwen3Config", "Qwen3Model", {"head_dim": 16}, tmp_path)
    with torch.no_grad():
        row = variant.reference(torch.tensor([tokens(9)])).last_hidden_state[0, -1]
    assert (
        Engine(variant.model).embed([tokens(9)])[0] - torch.nn.functional.normalize(row, dim=0)
    ).abs().max() <= 1e-5
    assert not variant.model.generates
    with pytest.raises(RuleError, match="a model that generates has a head"):
        variant.model.logits(row[None])


def test_layers_with_the_same_layout_and_window_share_a_group(tmp_path):
    variant = make("Gemma3TextConfig", "Gemma3ForCausalLM", CASES["gemma3_text"][2], tmp_path)
    groups = variant.model.groups(4, "bfloat16")
    assert [(g.window, len(g.layers), g.page_size, g.kv_dtype) for g in groups] == [
        (9, 2, 4, "bfloat16"),
        (None, 1, 4, "bfloat16"),
    ]
    assert [(p.group, p.layer) for p in variant.model.layer_map] == [(0, 0), (1, 0), (0, 1)]
    embed = Engine(variant.model).kinds[EMBED]
    assert [(g.window, g.layout) for g in embed.specs] == [(9, "fresh"), (None, "fresh")]
