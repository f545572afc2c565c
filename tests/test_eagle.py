"""EAGLE heads: a small one equals a plain float64 computation, step by step and on a tree; chains
continue while they have a chance; a head that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_speculation import PLAIN, answers
from torch import Tensor

from lockstep.attention import select
from lockstep.attention.reference import Backend
from lockstep.config import EngineConfig
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.lab.plain.layers import Weights, gated_mlp, linear, rms_norm
from lockstep.lab.plain.layers import grouped_attention as attention
from lockstep.lab.tiny import BART, COMMON, CONTEXT, LLAMA, VOCAB, loaded, parts
from lockstep.llm.api import LLM
from lockstep.llm.engine import Engine
from lockstep.models.loader import STATED
from lockstep.plan.build import RequestWork, build
from lockstep.run.kind import group_specs
from lockstep.run.runner import Runner, StepOutput
from lockstep.spec import eagle, eagle3
from lockstep.spec.depth import FIRST_CHANCE, Costs, round_down
from lockstep.spec.draft import DraftRequest, DraftSetup
from lockstep.types import RuleError

D, KNOWN, ROWS = COMMON["hidden_size"], 23, 32
TOKENS = torch.arange(KNOWN) * 2 + 3  # the tokens that an EAGLE-3 head here knows
EAGLE, EAGLE3 = eagle.ARCHITECTURE, eagle3.ARCHITECTURE
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def tensors(architecture: str) -> dict[str, Tensor]:
    """Returns random tensors of a small head, by their public names."""
    wide = 2 * D if architecture == EAGLE3 else D
    layer = "midlayer" if architecture == EAGLE3 else "layers.0"
    sizes = {f"{layer}.self_attn.{n}_proj": (w, wide) for n, w in (("q", 32), ("k", 16), ("v", 16))}
    sizes |= {f"{layer}.self_attn.o_proj": (D, 32), f"{layer}.mlp.down_proj": (D, 48)}
    sizes |= {f"{layer}.mlp.gate_proj": (48, D), f"{layer}.mlp.up_proj": (48, D)}
    if architecture == EAGLE3:
        sizes |= {"fc": (D, 3 * D), "lm_head": (KNOWN, D), "norm": (D,)}
        sizes |= {f"midlayer.{name}": (D,) for name in NORMS}
    else:
        sizes |= {"fc": (D, 2 * D), "layers.0.post_attention_layernorm": (D,)}
    gen, out = torch.Generator().manual_seed(5), dict[str, Tensor]()
    for name, size in sizes.items():
        noise = torch.randn(size, generator=gen)
        out[f"{name}.weight"] = noise / D**0.5 if len(size) > 1 else 1 + 0.1 * noise
    if architecture == EAGLE3:
        out["d2t"] = TOKENS - torch.arange(KNOWN)
        out["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, TOKENS, True)
    else:
        out["fc.bias"] = torch.randn(D, generator=gen)
        out["embed_tokens.weight"] = torch.randn(VOCAB, D, generator=gen)
    return out


def config_of(architecture: str) -> dict[str, Any]:
    own = {"architectures": [architecture], "num_hidden_layers": 1, "model_type": "llama"}
    if architecture == EAGLE3:
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
        return {**COMMON, **own, STATED: True, "draft_vocab_size": KNOWN, "eagle_config": layers}
    return {**COMMON, **own, STATED: True, "bias": True}


def save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(weights, folder / "model.safetensors")


def setup(path: Path | None, tiny: Any = LLAMA) -> DraftSetup:
    """Returns the setup for a target with random weights, as the engine makes it."""
    named = None if path is None else str(path)
    config = EngineConfig(
        page_size=4,
        kv_cache_dtype="float32",
        speculative_algorithm="eagle3",
        speculative_draft_model=named,
    )
    return DraftSetup(config=config, target=loaded(tiny), first_group=0, rows=ROWS)


def load(architecture: str, made: DraftSetup) -> Any:
    return (eagle3 if architecture == EAGLE3 else eagle).load(made)


@pytest.fixture(params=(EAGLE, EAGLE3))
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    save(tmp_path, config_of(request.param), tensors(request.param))
    return load(request.param, setup(tmp_path)).kind.model


def plain(head: Any, ids: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (logits of draft tokens or of all tokens, states) in float64, for rows at positions
    0… with the states `given`."""
    three = isinstance(head, eagle3.Eagle3)
    weights = Weights(tensors(EAGLE3 if three else EAGLE))
    layer = weights.at("midlayer") if three else weights.at("layers", 0)
    embedded, x = head.embedding.weight.double()[ids], given.double()

    def norm(x: Tensor, name: str, of: Weights = layer) -> Tensor:
        return rms_norm(x, of[f"{name}.weight"], COMMON["rms_norm_eps"])

    if three:
        wide = torch.cat((norm(embedded, "input_layernorm"), norm(x, "hidden_norm")), -1)
    else:
        wide = x = linear(torch.cat((embedded, x), -1), weights, "fc", bias=True)
    x = x + attention(wide, {**COMMON, "model_type": "llama"}, layer.at("self_attn"), 0)
    x = x + gated_mlp(norm(x, "post_attention_layernorm"), layer.at("mlp"), "silu")
    if three:
        return linear(norm(x, "norm", weights), weights, "lm_head", bias=False), x
    return x @ head.target.embedding.weight.double().T, x


class Rig:
    """One request, of which only the draft keys are kept."""

    def __init__(self, head: Any) -> None:
        self.head, self.kind = head, head.draft.kind
        specs = group_specs([self.kind])
        self.runner = Runner(specs, [16], Backend(), head.ops)
        self.table = PageTable(CacheGroups(specs, [PagePool(16)]))

    def step(self, ids: Tensor, given: Tensor, begin: int, parents: Any = None) -> StepOutput:
        self.table.reserve(begin + len(ids), len(parents or ()))
        self.head.hidden[: len(ids)] = given
        work = RequestWork(
            cached_len=begin,
            new_len=len(ids),
            pages=self.table.views((0,)),
            emit=tuple(range(len(ids))),
            parents=parents,
        )
        with torch.no_grad():
            return self.runner.run(build(self.kind.specs, [work]), ids, self.kind)


def close(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


def test_a_head_has_the_values_of_its_layout_and_continues_from_its_own_states(head):
    """Rows with the target's states, then a chain: each row is given the state that the previous
    row made."""
    gen, rig = torch.Generator().manual_seed(1), Rig(head)
    count = len(head.target_layers)
    states = [torch.randn(9, D, generator=gen) for _ in range(count)]
    ids = torch.randint(VOCAB, (12,), generator=gen)
    given = head.fuse(torch.cat(states, -1))
    if count == 3:
        fused = linear(torch.cat(states, -1).double(), Weights(tensors(EAGLE3)), "fc", bias=False)
    else:
        norm = head.target.norm.weight.double()
        fused = rms_norm(states[0].double(), norm, COMMON["rms_norm_eps"])
    assert close(given, fused)
    out = rig.step(ids[:5], given[:5], 0)
    out = rig.step(ids[5:9], given[5:], 5)
    for end in range(9, 12):
        logits, own = plain(head, ids[:end], given)
        assert close(out.next_hidden[-1], own[-1])
        drafted = head.draft.logits(out.emitted)[-1]
        known = head.token_ids if count == 3 else torch.arange(VOCAB)
        assert drafted.dtype is torch.float32 and close(drafted[known], logits[-1])
        rest = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, known, False)
        assert torch.isinf(drafted[rest]).all()
        given = torch.cat((given, out.next_hidden[-1:]))
        out = rig.step(ids[end : end + 1], given[-1:], end) if end < 11 else out


def test_branches_of_a_draft_tree_do_not_see_each_other(head):
    """Two tokens after the committed rows, and one row after each: every path is a chain."""
    gen, rig = torch.Generator().manual_seed(2), Rig(head)
    ids, given = torch.randint(VOCAB, (6,), generator=gen), torch.randn(6, D, generator=gen)
    rig.step(ids, given, 0)
    tokens, fed = torch.randint(VOCAB, (4,), generator=gen), torch.randn(4, D, generator=gen)
    first = rig.step(tokens[:2], fed[:2], 6, (-1, -1))
    second = rig.step(tokens[2:], fed[2:], 6, (-1, -1, 0, 1))
    for branch in range(2):
        path = [branch, 2 + branch]
        _, own = plain(head, torch.cat((ids, tokens[path])), torch.cat((given, fed[path])))
        assert close(first.next_hidden[branch], own[6])
        assert close(second.next_hidden[branch], own[7])


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("architecture", [EAGLE, EAGLE3])
def test_answers_with_a_random_head_have_the_bits_of_plain_decoding(architecture, top_k, tmp_path):
    """A random head is wrong nearly always. The built-in model's head, which is right, has its own
    test."""
    save(tmp_path, config_of(architecture), tensors(architecture))
    head = {
        "speculative_algorithm": "eagle3" if architecture == EAGLE3 else "eagle",
        "speculative_draft_model": str(tmp_path),
        "speculative_eagle_topk": top_k,
    }
    want, _ = answers(engine())
    got, counts = answers(engine(**head))
    assert got == want and counts.drafted - counts.accepted > 100
    got, _ = answers(engine(**head, chunked_prefill_size=24, bucket_sizes=(8, 24)))
    assert got == want


def engine(**options: Any) -> Engine:
    config = EngineConfig(context_length=CONTEXT, max_total_tokens=2000, page_size=4, **options)
    made = Engine(config, parts(LLAMA, select.load("cpu")))
    if made.speculation is not None:
        made.speculation.adaptive = False
    return made


def test_a_chain_grows_until_its_chance_falls_below_the_minimum(tmp_path):
    save(tmp_path, config_of(EAGLE3), tensors(EAGLE3))
    made = engine(speculative_algorithm="eagle3", speculative_draft_model=str(tmp_path))
    made.add((5, 6, 7, 8), PLAIN)
    for _ in range(3):
        made.step()
    (request,), draft = made.scheduler.running, made.speculation.draft
    most = draft.steps
    made.scheduler.make_room(request, most + 1, 0)
    lengths = {}
    for min_chance in (0.0, 1e-9, 0.02, 1.0):
        (tree,) = draft.propose([DraftRequest(request, PLAIN, most, most, min_chance)])
        lengths[min_chance] = len(tree.token_ids)
    assert lengths[0.0] == lengths[1e-9] == most and lengths[1.0] == 1, lengths
    assert 1 <= lengths[0.02] <= most


def test_the_minimum_chance_of_a_draft_token_covers_its_verify_row_and_its_draft_step():
    costs = Costs()
    assert costs.min_chance() == FIRST_CHANCE
    for cold in (9.0, 1.0, 1.0):
        costs.step(0, 4.0 * cold)
        costs.step(4, 6.0 * cold)
        costs.draft.add(3, 1.5 * cold)
    assert costs.row_s == pytest.approx(0.5), "cold times say nothing"
    assert costs.min_chance() == FIRST_CHANCE, "one depth says nothing of others"
    assert costs.first_s == pytest.approx(1.5), "and costs the same at any"
    for _ in range(9):
        costs.step(2, 5.0)
    assert costs.min_chance() == pytest.approx(0.5 / 4.0)
    for _ in range(3):
        costs.draft.add(6, 2.4)
    assert costs.guess_s == pytest.approx(0.3), "three guesses more cost 0.9"
    assert costs.min_chance() == pytest.approx((0.3 + 0.5) / 4.0)
    for rows, about in ((1, 1), (15, 15), (16, 16), (17, 16), (31, 30), (100, 96)):
        assert round_down(rows) == about


def test_fused_layers_that_a_config_does_not_name_are_those_of_eagle3():
    assert eagle3.fused_layers({}, 36) == (1, 17, 32)
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}}
    assert eagle3.fused_layers(named, 6) == (0, 3, 5)


def change(doc: dict[str, Any], **values: Any) -> None:
    doc.update(values)


BAD = {
    "vocab_size of a head is that of the model that it drafts for, 61; got 62": (
        lambda config, weights: change(config, vocab_size=62)
    ),
    "hidden_size of a head is that of the model that it drafts for, 32; got 64": (
        lambda config, weights: change(config, hidden_size=64)
    ),
    "target_hidden_size of a head is that of the model that it drafts for, 32; got 48": (
        lambda config, weights: change(config, target_hidden_size=48)
    ),
    "a head has one layer; got 2": lambda config, weights: change(config, num_hidden_layers=2),
    "names the architecture LlamaForCausalLMEagle3; got \\['Other'\\]": (
        lambda config, weights: change(config, architectures=["Other"])
    ),
    "does not set norm_before_residual; got True": (
        lambda config, weights: change(config, norm_before_residual=True)
    ),
    "1 missing: fc.weight": lambda config, weights: weights.pop("fc.weight"),
    "1 missing: d2t": lambda config, weights: weights.pop("d2t"),
    "1 missing: midlayer.hidden_norm.weight": (
        lambda config, weights: weights.pop("midlayer.hidden_norm.weight")
    ),
    "fc.weight is \\[32, 64\\], not \\[32, 96\\]": (
        lambda config, weights: change(weights, **{"fc.weight": torch.ones(32, 64)})
    ),
    "1 unknown to the model: other.weight": (
        lambda config, weights: change(weights, **{"other.weight": torch.ones(2)})
    ),
    "d2t leads to 23 tokens, each once, and t2d marks these; got 23 from 3 to 61": (
        lambda config, weights: weights["d2t"].index_fill_(0, torch.tensor(22), 39)
    ),
    "d2t leads to 23 tokens, each once, and t2d marks these; got 22 from": (
        lambda config, weights: weights["d2t"].index_fill_(0, torch.tensor(1), 2)
    ),
    "draft_vocab_size is a whole number from 1 to the model's 61; got 0": (
        lambda config, weights: change(config, draft_vocab_size=0)
    ),
    "reads the states after three of the model's 2 layers; got \\[0, 1, 2\\]": (
        lambda config, weights: change(
            config, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        )
    ),
    "head_dim in config.json is from 1 to .*: the files hold .* got 2147483648": (
        lambda config, weights: change(config, head_dim=2**31)
    ),
    "num_attention_heads in config.json is from 1 to .*: the files hold .* got 1000000": (
        lambda config, weights: change(config, num_attention_heads=10**30)
    ),
    "config.json describes a head; got AttributeError": (
        lambda config, weights: config.pop("hidden_act")
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_a_head_that_does_not_fit_is_refused(message, tmp_path):
    config, weights = config_of(EAGLE3), tensors(EAGLE3)
    BAD[message](config, weights)
    save(tmp_path, config, weights)
    with pytest.raises(RuleError, match=message):
        eagle3.load(setup(tmp_path))


def test_a_head_needs_a_model_folder_and_a_decoder(tmp_path):
    for algorithm in (eagle, eagle3):
        with pytest.raises(RuleError, match="a folder or a hub id; got none"):
            algorithm.load(setup(None))
    save(tmp_path, config_of(EAGLE3), tensors(EAGLE3))
    with pytest.raises(RuleError, match="continues a decoder that generates; got bart"):
        eagle3.load(setup(tmp_path, BART))


def test_a_draft_tree_with_a_top_k_of_0_is_refused():
    with pytest.raises(RuleError, match=r"topk is a whole number from 1 to .*; got 0"):
        EngineConfig(speculative_algorithm="eagle3", speculative_eagle_topk=0)


def test_a_head_with_more_rows_than_memory_is_refused_with_the_option_to_lower():
    with pytest.raises(RuleError, match=r"memory for .* rows of a head, .* Lower speculative_n"):
        LLM(speculative_algorithm="eagle3", max_running_requests=2**31 - 1)


def test_integer_tensors_other_than_d2t_and_t2d_are_refused_as_weights(tmp_path):
    """d2t and t2d are read as what they are; an integer tensor under any other name is refused."""
    save(tmp_path, config_of(EAGLE3), {**tensors(EAGLE3), "codes": torch.ones(2).int()})
    with pytest.raises(RuleError, match="weights are floating point; got 1 others: codes is I32"):
        eagle3.load(setup(tmp_path))
