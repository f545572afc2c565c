"""The value property of the engine's cells: right numbers pass, mistakes that engine and oracle
share do not.

The bit oracle runs the engine's own layers, so a mistake in `nn`, in `models` or in the kernels for
GEMMs and rows is in both, and no bit differs. Each such mistake below is planted, and the cell must
go red by its values and by nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_harness import Engine
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from lockstep.attention import select
from lockstep.kernels.cpu import routing
from lockstep.kernels.cpu.ops import Ops
from lockstep.lab import fuzz, plain
from lockstep.lab.cells import MODELS_OF, Cell, run_cell
from lockstep.lab.engine_harness import EngineHarness, judge
from lockstep.lab.engine_recipes import PLAIN, SCORED, words
from lockstep.lab.options import CPU, Device, RunOptions
from lockstep.lab.recipes import Recipe
from lockstep.lab.recompute import StoryRequest
from lockstep.lab.tiny import (
    BART,
    DEEPSEEK,
    GEMMA2,
    GPT_OSS,
    LLAMA,
    MODELS,
    QWEN3,
    WINDOW,
    Tiny,
    checkpoint,
    loaded,
)
from lockstep.lab.values import Values, truth
from lockstep.llm.engine import BUILTIN
from lockstep.models import bart, llama
from lockstep.models.loader import load, model_types
from lockstep.nn import attention, decoder, layers

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
BERT = {
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "is_decoder": False,
    "add_cross_attention": False,
}
GROUPS = {"topk_method": "group_limited_greedy"}
NARROW = Device("cpu", "bfloat16")
QWEN3_MOE = Tiny(
    "qwen3-moe",
    "experts",
    "qwen3_moe",
    {**SPARSE, "mlp_only_layers": [0], "decoder_sparse_step": 1, "sliding_window": WINDOW},
)
OTHERS = (
    QWEN3_MOE,
    Tiny("mistral", "one window", "mistral", {"sliding_window": WINDOW}),
    Tiny("qwen2", "biases", "qwen2", QWEN3.config),
    Tiny(
        "deepseek-v2",
        "groups",
        "deepseek_v2",
        {**DEEPSEEK.config, "topk_method": "group_limited_greedy"},
    ),
    Tiny(
        "gemma3",
        "two ropes",
        "gemma3_text",
        {
            **GEMMA2.config,
            "attn_logit_softcapping": None,
            "rope_parameters": dict.fromkeys(QWEN3.config["layer_types"], ROPE),
        },
    ),
)


def judged(tiny: Tiny) -> dict[str, Any]:
    """Returns the findings of a cell of this model, by property."""
    counters = ("batched_steps", "chunks")
    recipe = Recipe("engine-few", "a few", few, counters, MODELS_OF["every model"])
    result = judge(recipe, tiny, select.load("cpu"), RunOptions(quick=True))
    return {finding.name: finding for finding in result.findings}


def few(rig: EngineHarness, quick: bool) -> None:
    """Plays two requests longer than the window, one of them scored, in chunks."""
    orders = [
        StoryRequest(words(21), PLAIN),
        StoryRequest(words(17, 1), PLAIN if rig.oracle.encoder else SCORED, at=1),
    ]
    rig.play("batch", rig.engine(chunked_prefill_size=512 if rig.oracle.encoder else 8), orders)
    rig.counters["chunks"] += rig.oracle.encoder is not None


@pytest.mark.parametrize("tiny", [*MODELS, *OTHERS], ids=lambda tiny: tiny.name)
def test_the_engine_has_the_values_of_the_plain_model(tiny: Tiny):
    found = judged(tiny)
    assert all(finding.held for finding in found.values()), found
    assert int(found["value"].detail.split()[0]) >= 40, found["value"].detail


def test_the_judged_models_are_of_every_type_that_generates():
    assert sorted({tiny.model_type for tiny in (*MODELS, *OTHERS)} | {"bert"}) == model_types()


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_embeddings_have_the_values_of_the_plain_model(pooling: str):
    for tiny in (Tiny("bert", "an encoder", "bert", BERT), LLAMA):
        values, model = Values(checkpoint(tiny)), loaded(tiny).model
        prompts = [words(n, n) for n in (12, 30, 1)]
        vectors = Engine(model).embed(prompts, pooling)
        for prompt, vector in zip(prompts, vectors, strict=True):
            values.claim_embedding(prompt, pooling, vector)
        verdict = values.verdict()
        assert verdict.faults == [] and verdict.judged == 3 * 32
        values.claim_embedding(prompts[0], pooling, vectors[1])
        assert len(values.verdict().faults) == 1


def test_the_built_in_model_has_the_values_of_the_plain_model():
    """Its config states every field; its window is 128."""
    values = Values(
        plain.Checkpoint(
            json.loads((BUILTIN / "config.json").read_text("utf-8")),
            load_file(BUILTIN / "model.safetensors"),
        )
    )
    ids = torch.randint(4096, (140,), generator=torch.Generator().manual_seed(0)).tolist()
    model = load(BUILTIN).model
    told = model.logits(Engine(model).whole(ids, 50)[:-1]).log_softmax(-1)
    values.claim(ids, 1, told.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    verdict = values.verdict()
    assert verdict.faults == [] and verdict.judged == 139 and 0 < verdict.error < 1e-3


@pytest.mark.parametrize(
    ("tiny", "device"),
    # experts are too close for bfloat16 to tell apart: after their first choice nothing is judged
    [*((t, CPU) for t in MODELS), *((t, NARROW) for t in MODELS if t not in (DEEPSEEK, GPT_OSS))],
    ids=lambda given: given.dtype if isinstance(given, Device) else given.name,
)
def test_a_tolerance_is_neither_far_beyond_its_dtype_nor_below_it(tiny: Tiny, device: Device):
    """Rows computed by torch in that dtype use some per cent of the tolerance, never all of it."""
    c = checkpoint(tiny, device)
    source = words(23) if tiny is BART else ()

    def compute() -> torch.Tensor:
        return plain.logits(c, words(30), source).log_softmax(-1)

    want = truth(compute, device)
    with Narrow(device.compute):
        have = compute()
    assert have.dtype is device.compute
    used = (have - want.values)[: want.decided].abs().max() / want.tolerance
    assert 0.01 < float(used) < (0.5 if device == CPU else 1)
    assert want.tolerance < 1e-3 * device.unit / CPU.unit, "a tolerance that hides mistakes"


class Narrow(TorchFunctionMode):
    """Gives a narrower dtype wherever float64 is asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.double:
            return args[0].to(self.dtype)
        given = {k: self.dtype if v is torch.float64 else v for k, v in (kwargs or {}).items()}
        return func(*args, **given)


def test_a_wrong_or_missing_value_is_a_fault_and_a_narrow_cache_has_a_wider_tolerance():
    ids = words(12)
    right = plain.logits(checkpoint(LLAMA), ids).log_softmax(-1)[torch.arange(11), ids[1:]]
    for wrong, cache, faults in (
        (0.0, "float32", 0),
        (3e-4, "float32", 1),
        (3e-4, "bfloat16", 0),
        (float("nan"), "bfloat16", 1),
    ):
        values = Values(checkpoint(LLAMA))
        told = right + torch.tensor([0.0] * 6 + [wrong] + [0.0] * 4)
        values.claim(ids, 1, told, cache_dtype=cache)
        assert len(values.verdict().faults) == faults, (wrong, cache)
    with pytest.raises(ValueError, match="zip"):
        values.claim(ids, 1, right[:-1])


def test_a_sequence_is_judged_up_to_a_choice_of_experts_that_rounding_may_change():
    c, ids = checkpoint(GPT_OSS), words(14)
    assert truth(lambda: plain.logits(c, ids)).decided > len(ids)
    names = ("model.layers.1.mlp.router.weight", "model.layers.1.mlp.router.bias")
    equal = {name: c.tensors[name][[0, 1, 2, 2]] for name in names}
    twins = plain.Checkpoint(c.config, {**c.tensors, **equal})
    found = truth(lambda: plain.logits(twins, ids))
    decided = found.decided
    assert 0 < decided < len(ids) - 1, "two experts with one score, of which a row may take one"
    assert found.tolerance < 1e-3, "a row that takes the other one says nothing about roundings"
    values = Values(twins)
    values.claim(ids, 1, [0.5] * 13)
    verdict = values.verdict()
    assert (verdict.judged, verdict.undecided) == (decided, 13 - decided) and verdict.faults


def test_traces_judge_the_values_of_their_requests():
    trace, rig = fuzz.draw(0), fuzz.rig()
    assert fuzz.run(trace, rig)[0] == []
    order = trace.orders[0]
    (answer, *_) = rig.oracle.completions(order)
    shifted = [x + 1e-2 for x in answer.logprobs]
    rig.values.claim((*order.prompt, *answer.token_ids), len(order.prompt), shifted)
    (fault,) = fuzz.run(trace, rig)[0]
    assert "off by 0.01" in fault
    assert fuzz.run(trace, rig)[0] == [], "a claim is judged once"


Planted = Callable[[pytest.MonkeyPatch], None]


def turned_backwards(patch: pytest.MonkeyPatch) -> None:
    """kernels/cpu/rows: the sign of the half rotation is wrong."""
    right = Ops.rope_cos_sin

    def wrong(*operands: Any) -> Any:
        found = right(*operands)
        return found._replace(sin=-found.sin)

    patch.setattr(Ops, "rope_cos_sin", staticmethod(wrong))


def positions_from_one(patch: pytest.MonkeyPatch) -> None:
    """models/bart: learnt positions are one row off."""
    patch.setattr(bart, "OFFSET", 1)


def norm_without_one(patch: pytest.MonkeyPatch) -> None:
    """nn/layers: gemma's norm weight as it is stored in the file, without the 1."""
    right = layers.RMSSpec.build
    patch.setattr(
        layers.RMSSpec, "build", lambda self, *a: right(replace(self, plus_one=False), *a)
    )


def router_without_norm(patch: pytest.MonkeyPatch) -> None:
    """kernels/cpu/routing: the chosen experts' weights do not add up to 1."""
    right = Ops.route

    def wrong(logits: Any, routing: Any, correction: Any) -> Any:
        return right(logits, replace(routing, norm=False), correction)

    patch.setattr(Ops, "route", staticmethod(wrong))


def worst_group_first(patch: pytest.MonkeyPatch) -> None:
    """kernels/cpu/routing: the groups of experts are ranked in reverse."""
    right = routing.limited

    def wrong(ranked: Any, how: Any, in_pairs: bool) -> Any:
        return torch.where(right(-ranked, how, in_pairs).isinf(), -torch.inf, ranked)

    patch.setattr(routing, "limited", wrong)


def residual_of_the_norm(patch: pytest.MonkeyPatch) -> None:
    """nn/decoder: the feed-forward is added to the normed row."""
    right = decoder.Block.__call__

    def wrong(self: Any, *operands: Any) -> Any:
        hidden, residual = right(self, *operands)
        return hidden, self.pre_mlp_norm(residual)

    patch.setattr(decoder.Block, "__call__", wrong)


def key_norm_for_queries(patch: pytest.MonkeyPatch) -> None:
    """nn/attention: queries get the keys' norm."""
    right = Ops.qk_norm_rope

    def wrong(x: torch.Tensor, heads: Any, weights: torch.Tensor, cos_sin: Any) -> Any:
        return right(x, heads, weights.flip(0), cos_sin)

    patch.setattr(Ops, "qk_norm_rope", staticmethod(wrong))


def lost_bias(patch: pytest.MonkeyPatch) -> None:
    """nn/layers: a fused GEMM lacks its bias."""
    right = layers.WeightSource.fused

    def wrong(self: Any, widths: Any, k: int, bias: bool = False) -> Any:
        return right(self, widths, k, bias and len(widths) == 1)

    patch.setattr(layers.WeightSource, "fused", wrong)


def gate_and_up_swapped(patch: pytest.MonkeyPatch) -> None:
    """kernels/cpu/rows: the second half is taken for the gate."""
    right = Ops.act_and_mul

    def wrong(x: torch.Tensor, act: Any) -> Any:
        return right(torch.cat(x.chunk(2, -1)[::-1], -1), act)

    patch.setattr(Ops, "act_and_mul", staticmethod(wrong))


def gate_without_one(patch: pytest.MonkeyPatch) -> None:
    """kernels/cpu/rows: up instead of up + 1."""
    right = Ops.clamped_swiglu

    def wrong(x: torch.Tensor, alpha: float, limit: float) -> Any:
        gate, up = x.chunk(2, -1)
        return right(torch.cat((gate, up - 1), -1), alpha, limit)

    patch.setattr(Ops, "clamped_swiglu", staticmethod(wrong))


def eps_too_large(patch: pytest.MonkeyPatch) -> None:
    """kernels/cpu/rows: a norm's eps is 1e-3 instead of 1e-6."""
    right = Ops.rms_norm
    patch.setattr(Ops, "rms_norm", staticmethod(lambda x, w, eps: right(x, w, 1e-3)))


def half_precision_products(patch: pytest.MonkeyPatch) -> None:
    """kernels/cpu/gemm: rows are rounded to bfloat16 first."""
    right = Ops.linear
    patch.setattr(Ops, "linear", staticmethod(lambda x, w: right(x.bfloat16().float(), w)))


def window_one_wider(patch: pytest.MonkeyPatch) -> None:
    """models/llama: a row sees one key too many."""
    right = llama.windowed

    def wrong(config: Any, spec: Any) -> Any:
        wider = SimpleNamespace(**vars(config) | {"sliding_window": config.sliding_window + 1})
        return right(wider, spec)

    patch.setattr(llama, "windowed", wrong)


def scale_of_the_latent(patch: pytest.MonkeyPatch) -> None:
    """nn/attention: MLA's scores are scaled by the width of what is stored."""
    right = attention.Latent.group

    def wrong(self: Any) -> Any:
        group = right(self)
        layers = [replace(layer, scale=group.d_qk**-0.5) for layer in group.layers]
        return replace(group, layers=tuple(layers))

    patch.setattr(attention.Latent, "group", wrong)


PLANTED: dict[Planted, Tiny] = {
    turned_backwards: LLAMA,
    positions_from_one: BART,
    norm_without_one: GEMMA2,
    router_without_norm: QWEN3_MOE,
    worst_group_first: DEEPSEEK,
    residual_of_the_norm: QWEN3,
    key_norm_for_queries: QWEN3,
    lost_bias: GPT_OSS,
    gate_and_up_swapped: LLAMA,
    gate_without_one: GPT_OSS,
    eps_too_large: QWEN3,
    half_precision_products: LLAMA,
    window_one_wider: QWEN3,
    scale_of_the_latent: DEEPSEEK,
}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_a_mistake_that_the_oracle_of_bits_shares_is_found_by_the_values(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
):
    planted(monkeypatch)
    found = judged(PLANTED[planted])
    assert {"batch", "poison", "pages", "value"} <= set(found)
    assert [name for name, finding in found.items() if not finding.held] == ["value"], found


def test_a_cell_of_the_matrix_fails_by_its_values(monkeypatch: pytest.MonkeyPatch):
    turned_backwards(monkeypatch)
    found = run_cell(Cell.parse("cpu/engine-page/llama"), RunOptions(quick=True)).findings
    assert [each.name for each in found if not each.held] == ["value"]
