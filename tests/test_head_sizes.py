"""Head sizes that are no multiple of 8: padded with zero columns, served by the canonical backend,
equal to transformers.

Only the cache is padded: a model's q, k and v keep their own columns, storages and kernels have
`order.stored_len` of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from model_harness import Engine
from test_models import CASES, MLA, Case, agree, check_greedy, greedy, make, tokens

from lockstep import LLM, order
from lockstep.kernels.cpu.ops import Ops
from lockstep.kv.pool import Pool, arithmetic, group_bytes, slot_bytes
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.types import KV_FORMATS, AttnSpec, GroupSpec, Layout, Refused

RANK_22 = {
    **MLA,
    "kv_lora_rank": 22,
    "v_head_dim": 18,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama heads of 20": ("llama", {"head_dim": 20}),
    "qwen3 heads of 28": ("qwen3", {"head_dim": 28}),
    "gemma3 heads of 36": ("gemma3_text", {"head_dim": 36, "query_pre_attn_scalar": 36}),
    "gpt_oss heads of 12": ("gpt_oss", {"head_dim": 12}),
    "deepseek rank 22": ("deepseek_v3", {"kv_lora_rank": 22}),
    "deepseek, nothing a multiple of 8": ("deepseek_v2", RANK_22),
    "llama heads of 2": ("llama", {"head_dim": 2}),
    "bart heads of 7 and 14": (
        "bart",
        {"d_model": 28, "encoder_attention_heads": 4, "decoder_attention_heads": 2},
    ),
    "bert heads of 5": ("bert", {"hidden_size": 20}),
}
DECODERS = [name for name, (kind, _) in HEADS.items() if kind not in ("bart", "bert")]


@pytest.fixture(scope="module")
def case(request, tmp_path_factory) -> Case:
    kind, changes = HEADS[request.param]
    config, model, known = CASES[kind]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make(config, model, {**known, **changes}, tmp_path_factory.mktemp(kind))
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", DECODERS, indirect=True)
def test_every_head_size_is_canonical_and_equals_transformers(case):
    llm = LLM(str(case.folder), max_total_tokens=256)
    assert llm.fingerprint.startswith("order=canonical;backend=cpu;")
    prompt = tokens(71)
    engine = Engine(case.model)
    whole = engine.whole(prompt)
    agree(case.model.logits(whole), case.logits(prompt))
    assert torch.equal(Engine(case.model, 4).whole(prompt, 7), whole), "chunks or pages change bits"
    request = engine.request()
    chosen = greedy(case, engine, request, engine.whole(prompt[:31], 16, request), 24)
    assert check_greedy(chosen, case.logits(prompt[:31] + chosen)[30:-1]) <= 3


@pytest.mark.parametrize("case", ["bert heads of 5"], indirect=True)
def test_an_encoder_with_heads_of_5_equals_transformers(case):
    assert LLM(str(case.folder)).fingerprint.startswith("order=canonical;backend=cpu;")
    prompts = [tokens(n, seed=n) for n in (70, 9)]
    together = Engine(case.model).embed(prompts, "first")
    for prompt, row in zip(prompts, together):
        with torch.no_grad():
            want = case.reference(torch.tensor([prompt])).last_hidden_state[0, 0]
        assert (row - want / want.norm()).abs().max() < 1e-5
        assert torch.equal(Engine(case.model).embed([prompt], "first")[0], row)


@pytest.mark.parametrize("case", ["bart heads of 7 and 14"], indirect=True)
def test_cross_attention_with_heads_of_7_and_14_equals_transformers(case):
    assert LLM(str(case.folder), max_total_tokens=256).fingerprint.startswith(
        "order=canonical;backend=cpu;"
    )
    source, prompt = tokens(70), tokens(20, seed=1)
    engine = Engine(case.model)
    request = engine.request()
    engine.encode([(request, source)])
    with torch.no_grad():
        want = case.reference(
            torch.tensor([source]), decoder_input_ids=torch.tensor([prompt])
        ).logits[0]
    agree(case.model.logits(engine.whole(prompt, 6, request)), want)


def test_zero_columns_change_no_bit_of_a_score_or_an_output():
    """A head of 20 columns and the same head with 12 zero columns made by the model have the same
    bits."""
    from test_attention import attend

    narrow = GroupSpec(Layout.DENSE, 2, 1, 20, 20, (AttnSpec(0.3),), page_size=4)
    wide = replace(narrow, d_qk=32, d_v=32)
    gen = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(150, 2, 20, generator=gen),
        torch.randn(150, 1, 20, generator=gen),
        torch.randn(150, 1, 20, generator=gen),
    )
    zeros = [torch.nn.functional.pad(t, (0, 12)) for t in (q, k, v)]
    out, lse = attend("cpu", narrow, q, k, v)
    wide_out, wide_lse = attend("cpu", wide, *zeros)
    assert torch.equal(out, wide_out[..., :20]) and torch.equal(lse, wide_lse)


def test_the_bytes_of_the_padding_are_counted_and_printed():
    spec = GroupSpec(Layout.DENSE, 2, 2, 20, 12, (AttnSpec(1.0),) * 3, page_size=4)
    pool = Pool(spec, 5, Ops())
    assert slot_bytes(spec) == 2 * (24 + 16) * 4
    assert sum(s.nbytes for layer in pool.storages for s in layer) == group_bytes(spec, 5)
    assert "heads of 20 stored as 24 and 12 stored as 16: 5 pages" in arithmetic([(spec, 5)])
    assert "stored as" not in arithmetic([(replace(spec, d_qk=24, d_v=16), 5)])
    latent = GroupSpec(Layout.LATENT, 2, 1, 30, 22, (AttnSpec(1.0),), page_size=4)
    assert slot_bytes(latent) == 32 * 4
    assert "heads of 30 stored as 32: 5 pages" in arithmetic([(latent, 5)])


@pytest.mark.parametrize("kv_dtype", sorted(KV_FORMATS))
def test_the_cache_stores_zeros_after_a_heads_own_columns(kv_dtype):
    spec = GroupSpec(
        Layout.DENSE, 1, 1, 5, 3, (AttnSpec(1.0, k_scale=0.5),), page_size=2, kv_dtype=kv_dtype
    )
    pool = Pool(spec, 3, Ops(), lambda shape, dtype, device: torch.full(shape, torch.nan).to(dtype))
    table = PageTable(CacheGroups((spec,), (PagePool(3),)))
    table.reserve(2)
    pool.write(0, torch.tensor([2, 3]), torch.ones(2, 1, 5), torch.ones(2, 1, 3))
    k, v = (storage[2:4].float() for storage in pool.storages[0])
    assert torch.equal(k[..., :5], torch.full((2, 1, 5), 2.0)) and not k[..., 5:].any()
    assert torch.equal(v[..., :3], torch.ones(2, 1, 3)) and not v[..., 3:].any()
    assert [t.shape[2] for t in pool.keys(0)] == [5, 3]


def test_tiles_are_a_function_of_the_stored_head_size():
    assert [order.stored_len(d) for d in (1, 7, 8, 9, 20, 576)] == [8, 8, 8, 16, 24, 576]
    for d in range(1, 577):
        assert order.tile_len(d, d) == order.tile_len(order.stored_len(d), order.stored_len(d))


def test_a_head_that_no_canonical_backend_takes_is_refused_with_the_remedy(tmp_path):
    config, model, known = CASES["llama"]
    folder = make(
        config,
        model,
        {**known, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 578},
        tmp_path,
    ).folder
    with pytest.raises(
        Refused,
        match=r'head size 578, stored as 584,.*Ask for attention_backend="reference" by name',
    ):
        LLM(str(folder))
    assert LLM(str(folder), attention_backend="reference").fingerprint.startswith(
        "order=none;backend=reference;"
    )
