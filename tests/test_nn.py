"""Layers: a row's bits do not depend on the rows beside it. And model folders with wrong contents,
which must be refused with the reason."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from dataclasses import replace
from decimal import Decimal, localcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.attention import cpu
from lockstep.config import EngineConfig
from lockstep.kernels.cpu import gemm
from lockstep.kernels.cpu.ops import Ops
from lockstep.kernels.cpu.routing import Routes, best
from lockstep.lab import tiny
from lockstep.llm.engine import Engine
from lockstep.models.loader import load, model_types
from lockstep.nn import decoder, layers, mlp, rope
from lockstep.nn.layers import LayerNorm, Linear, RMSNorm
from lockstep.nn.mlp import Mlp, Moe
from lockstep.ops import Activation, CosSin, Routing
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ROWS = 65
OPS = Ops()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def invariant(run, x: Tensor, threads: tuple[int, ...] = (1, 2)) -> bool:
    """Returns whether the first m and the last m rows of x have the same bits as in run(x), for
    every m and every thread count."""
    want = run(x)
    for count in threads:
        torch.set_num_threads(count)
        for m in range(1, len(x) + 1):
            if not (torch.equal(run(x[:m]), want[:m]) and torch.equal(run(x[-m:]), want[-m:])):
                return False
    return True


SHAPES = [
    (200, 64),
    (7, 64),
    (1, 64),
    (3, 24),
    (33, 17),
    (512, 16),
    (1000, 72),
    (96, 1024),
    (64, 1025),
    (40, 3072),
]


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    return Linear(OPS.pack(weight, bias), OPS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_of_a_linear_layer_does_not_depend_on_other_rows(shape, bias):
    weight, b = noise(*shape), noise(shape[0], seed=1) if bias else None
    layer = linear(weight, b)
    assert invariant(layer, noise(ROWS, shape[1]))
    x = noise(5, shape[1], seed=2)
    assert (
        layer(x) - F.linear(x.double(), weight.double(), b.double() if bias else None)
    ).abs().max() < 1e-3


@pytest.mark.parametrize("shape", [(200, 64), (7, 64), (33, 17), (96, 130)])
def test_the_cpu_gemm_is_one_fma_chain_over_k(shape):
    """A product of two float32 numbers is exact in float64, so adding and rounding there is an fma,
    except for a tie in 2^29."""
    weight, bias = noise(*shape), noise(shape[0], seed=1)
    x = noise(3, shape[1], seed=2)
    acc = torch.zeros(3, shape[0])
    for k in range(shape[1]):
        acc = (acc.double() + x[:, k, None].double() * weight[:, k].double()).float()
    assert torch.equal(linear(weight, bias)(x), acc + bias)


def test_bfloat16_weights_stay_narrow_and_give_the_bits_of_float32():
    weight, bias = noise(200, 130).bfloat16().float(), noise(200, seed=1).bfloat16().float()
    narrow = gemm.pack(weight, bias)
    wide = replace(narrow, numbers=narrow.numbers.float())
    kinds = narrow.numbers.dtype, gemm.pack(weight, noise(200)).numbers.dtype
    assert kinds == (torch.bfloat16, torch.float32)
    for rows in (1, 2, 6, 7, 100):
        x = noise(rows, 130, seed=rows)
        assert torch.equal(gemm.linear(x, narrow), gemm.linear(x, wide))


def test_strided_rows_are_multiplied_with_the_bits_of_contiguous_rows():
    layer, x = linear(noise(24, 16)), noise(7, 40)
    assert torch.equal(layer(x[:, 8:24]), layer(x[:, 8:24].contiguous()))
    assert torch.equal(layer(noise(16, 7).T), layer(noise(16, 7).T.contiguous()))


@pytest.mark.parametrize("bias", [False, True])
def test_batched_and_grouped_gemms_have_the_bits_of_a_gemm_each(bias):
    """The heads of MLA, and experts: some with many rows, one with none."""
    weight, b = noise(5, 70, 24), noise(5, 70, seed=1) if bias else None
    packed = OPS.pack(weight, b)
    single = [OPS.pack(weight[g], None if b is None else b[g]) for g in range(5)]
    x = noise(9, 5, 40, seed=2)[..., 8:32]
    want = torch.stack([OPS.linear(x[:, g], single[g]) for g in range(5)], 1)
    assert torch.equal(OPS.batched_linear(x, packed), want)
    indptr, rows = torch.tensor([0, 1, 1, 104, 107, 110]), noise(110, 24, seed=3)
    parts = [OPS.linear(rows[indptr[g] : indptr[g + 1]], single[g]) for g in range(5)]
    routes = Routes(ids=rows, weights=rows, pairs=rows, indptr=indptr)
    assert torch.equal(gemm.grouped_linear(rows, packed, routes), torch.cat(parts))
    assert OPS.batched_linear(x[:0], packed).shape == (0, 5, 70)
    none = routes._replace(indptr=indptr * 0)
    assert gemm.grouped_linear(rows[:0], packed, none).shape == (0, 70)


def test_batched_weights_stay_exact_if_bfloat16_cannot_hold_one_group():
    weight = torch.cat((noise(1, 70, 24).bfloat16().float(), noise(1, 70, 24, seed=1)))
    x = noise(3, 2, 24, seed=2)
    have = OPS.batched_linear(x, OPS.pack(weight, None))
    for g in range(2):
        assert torch.equal(have[:, g], OPS.linear(x[:, g], OPS.pack(weight[g], None)))


def test_a_gemm_of_zero_rows_returns_zero_rows():
    assert linear(noise(24, 16), noise(24))(torch.zeros(0, 16)).shape == (0, 24)


@pytest.mark.parametrize("name", sorted(mlp.ACTIVATIONS))
@pytest.mark.parametrize("width", [3, 24, 72, 1407])
def test_activations_are_row_invariant_and_right(name, width):
    x = noise(ROWS, 2 * width) * 3
    act = mlp.activation(name)
    assert invariant(lambda x: OPS.act_and_mul(x, act), x)
    reference = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}.get(
        name, lambda t: F.gelu(t, approximate="tanh")
    )
    assert (OPS.activate(x, act) - reference(x.double())).abs().max() < 2e-6
    assert torch.isfinite(OPS.activate(torch.tensor([[-200.0, -90.0, 0.0, 200.0]]), act)).all()


def test_the_clamped_glu_is_row_invariant():
    assert invariant(lambda x: OPS.clamped_swiglu(x, 1.702, 7.0), noise(ROWS, 2 * 72) * 6)


def test_an_unknown_activation_is_refused():
    with pytest.raises(RuleError, match=r"an activation is one of silu, gelu.*got 'swish9'"):
        mlp.activation("swish9")


@pytest.mark.parametrize("width", [8, 24, 72, 200])
def test_norms_are_row_invariant(width):
    weight, bias = noise(width), noise(width, seed=1)
    for norm in (RMSNorm(weight, 1e-6, OPS), LayerNorm(weight, bias, 1e-5, OPS)):
        assert invariant(norm, noise(ROWS, width))
        assert invariant(
            lambda x, norm=norm: norm(x.view(len(x), 9, width)[:, 2:7]), noise(ROWS, 9 * width)
        ), "heads of a fused projection"


def cos_sin(turn: rope.Rope, positions: Tensor) -> CosSin:
    return OPS.rope_cos_sin(positions, torch.tensor(turn.inv_freq), turn.factor)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_row_invariant_and_leaves_the_other_columns_of_a_head_unchanged(interleaved):
    turn = rope.make({"rope_type": "default", "rope_theta": 1e4}, 24, 100, interleaved)
    x, positions = noise(ROWS, 3, 48), torch.arange(ROWS) * 977

    def run(rows: Tensor) -> Tensor:
        return OPS.rope(x[rows], cos_sin(turn, positions[rows]), interleaved)

    assert invariant(run, torch.arange(ROWS))
    assert torch.equal(run(torch.arange(ROWS))[..., 24:], x[..., 24:])
    assert torch.equal(
        run(torch.tensor([0]))[..., :12], x[:1, :, 0:24:2] if interleaved else x[:1, :, :12]
    ), "position 0 turns nothing"


SCALINGS = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 20,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    "dynamic": {"factor": 3.0},
}


@pytest.mark.parametrize("kind", ["default", *SCALINGS])
def test_frequencies_are_those_of_transformers(kind):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    params = {"rope_type": kind, "rope_theta": 5000.0, **SCALINGS.get(kind, {})}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters=dict(params),
    )
    if kind == "default":
        want, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        want, factor = ROPE_INIT_FUNCTIONS[kind](config)
    got = rope.make(params, 64, 512)
    assert torch.tensor(got.inv_freq).allclose(want, rtol=1e-6, atol=0)
    assert got.factor == pytest.approx(factor)


@pytest.mark.parametrize("length", [512, 513, 1536, 4000])
def test_a_dynamic_rope_is_stretched_for_the_context_length_and_by_no_sequence(length):
    """Up to max_position it is the plain rope; beyond, it has transformers' base for exactly the
    context length that was asked for."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    params = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 3.0}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters=dict(params),
    )
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    known = rope.for_context(params, 512, length)
    got = rope.make(known, 64, 512)
    assert torch.tensor(got.inv_freq).allclose(want, rtol=1e-6, atol=0)
    assert rope.longest(known, 512) == length
    assert (got == rope.make({"rope_type": "default", "rope_theta": 5000.0}, 64, 512)) == (
        length == 512
    )
    assert rope.for_context({"full": params, "window": None}, 512, length) == {
        "full": known,
        "window": None,
    }
    assert rope.for_context({**params, "context_length": 9999}, 512, None) == params, (
        "a config does not ask for a context"
    )


@pytest.mark.parametrize("kind", ["default", *SCALINGS])
@pytest.mark.parametrize(("dim", "theta"), [(56, 1e6), (128, 1e6), (112, 5e5), (20, 1e4)])
def test_frequencies_are_rounded_once(kind, dim, theta):
    """They are at most half a unit of float32 away from exact ones (60 digits); float32 arithmetic
    is two or three units away."""
    params = {"rope_type": kind, "rope_theta": theta, **SCALINGS.get(kind, {})}
    got = torch.tensor(rope.make(params, dim, 512).inv_freq)
    with localcontext(prec=60):
        plain = [Decimal(theta) ** -(Decimal(i) / dim) for i in range(0, dim, 2)]
        want = torch.tensor(
            [float(f) for f in scaled_exactly(kind, plain, theta, dim)], dtype=torch.float64
        )
    assert torch.equal(got, want.float())


def scaled_exactly(kind: str, plain: list[Decimal], theta: float, dim: int) -> list[Decimal]:
    """Returns the scaled frequencies, computed again with Decimal numbers only."""
    s = {k: Decimal(v) for k, v in SCALINGS.get(kind, {}).items()}
    two_pi = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    if kind == "linear":
        return [f / s["factor"] for f in plain]
    if kind == "llama3":
        turns = [(s["original_max_position_embeddings"] * f / two_pi) for f in plain]
        kept = [
            min(
                max(
                    (t - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"]),
                    Decimal(0),
                ),
                Decimal(1),
            )
            for t in turns
        ]
    elif kind == "yarn":
        length = s["original_max_position_embeddings"]
        low, high = (
            dim * (length / (b * two_pi)).ln() / (2 * Decimal(theta).ln())
            for b in (s["beta_fast"], Decimal(1))
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        kept = [
            1 - min(max(Decimal(i - low) / (high - low), Decimal(0)), Decimal(1))
            for i in range(dim // 2)
        ]
    else:
        return plain
    return [f * k + f / s["factor"] * (1 - k) for f, k in zip(plain, kept, strict=True)]


@pytest.mark.parametrize(("dim", "theta"), [(56, 1e6), (128, 1e6), (112, 5e5), (20, 1e4)])
def test_angles_up_to_131071_are_those_of_transformers(dim, theta):
    """With our frequencies transformers' cos and sin are ours up to the last place; with its own
    they differ by as much as its frequencies do."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    params = {"rope_type": "default", "rope_theta": theta}
    turn = rope.make(params, dim, 131072)
    positions = torch.cat(
        (
            torch.arange(300),
            torch.randint(131072, (3000,), generator=torch.Generator().manual_seed(0)),
            torch.tensor([131071]),
        )
    )
    cos, sin = cos_sin(turn, positions)
    angle = (positions.float()[:, None] * torch.tensor(turn.inv_freq)).double()
    assert torch.equal(cos, angle.cos().float()) and torch.equal(sin, angle.sin().float())
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=dim, max_position_embeddings=131072, rope_parameters=dict(params))
    )
    off = (theirs.inv_freq - torch.tensor(turn.inv_freq)).abs() * positions[:, None]
    for their_freqs in (True, False):
        if not their_freqs:
            theirs.inv_freq = torch.tensor(turn.inv_freq)
        want = [t[0, :, : dim // 2] for t in theirs(torch.zeros(1), positions[None])]
        bound = 2**-23 + (
            off + angle.abs() * 2**-23 if their_freqs else 0
        )  # two roundings of the angle, half a place each
        assert all(((a - b).abs() <= bound).all() for a, b in zip((cos, sin), want, strict=True))


def test_a_partial_rotary_factor_is_ignored_or_refused_as_in_transformers():
    whole = rope.make({"rope_type": "default", "rope_theta": 1e4}, 64, 512)
    assert (
        rope.make(
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, 64, 512
        )
        == whole
    )
    with pytest.raises(
        RuleError, match="with rope_type linear all columns of a head rotate, in transformers too"
    ):
        rope.make(
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            64,
            512,
        )


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (
            {"rope_type": "longrope", "rope_theta": 1e4},
            "rope_type is one of default, linear.*got 'longrope'",
        ),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "yarn rope_parameters are complete.*KeyError"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}, "frequencies finite"),
        ({"rope_theta": -3.0}, "frequencies finite"),
        ({"rope_theta": "1e4"}, "complete and positive.*TypeError"),
        ({"rope_theta": 1e-30}, "angles are at most 536870912"),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 1e12},
            r"partial_rotary_factor is in \(0, 1\]",
        ),
    ],
)
def test_bad_rope_parameters_are_refused(params, match):
    with pytest.raises(RuleError, match=match):
        rope.make(params, 64, 128)


def moe(routing: Routing, hidden: int = 32, inner: int = 40, shared: bool = True) -> Moe:
    seeds = range(routing.experts)
    up = torch.stack([noise(2 * inner, hidden, seed=seed) / 4 for seed in seeds])
    down = torch.stack([noise(hidden, inner, seed=seed + 50) / 4 for seed in seeds])
    silu = partial(OPS.act_and_mul, act=Activation.SILU)
    return Moe(
        router=linear(noise(routing.experts, hidden, seed=99)),
        correction=noise(routing.experts, seed=98) / 9 if routing.score == "sigmoid" else None,
        routing=routing,
        up=OPS.pack(up, None),
        down=OPS.pack(down, None),
        act=silu,
        shared=Mlp(linear(up[0] * 2), linear(down[0]), silu) if shared else None,
        ops=OPS,
    )


ROUTINGS = [
    Routing(3, 8, norm=True),
    Routing(3, 8, "chosen"),
    Routing(2, 8, "softmax", scale=1.5, groups=4, keep=2),
    Routing(3, 8, "sigmoid", norm=True, floor=1e-20, scale=2.5, groups=4, keep=2),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: r.score)
def test_a_row_has_the_same_bits_whatever_rows_share_its_experts(routing):
    layer = moe(routing)
    x = noise(33, 32)
    routes = OPS.route(layer.router(x), routing, layer.correction)
    assert (routes.indptr.diff() > 0).sum() > 4, "all rows at the same experts prove nothing"
    assert invariant(layer, x)
    parts, out = {}, layer.shared(x)
    for e in range(routing.experts):
        up, down = (
            Linear(gemm.Panels(w.numbers[e : e + 1], w.n), OPS) for w in (layer.up, layer.down)
        )
        for pair in routes.pairs[routes.indptr[e] : routes.indptr[e + 1]].tolist():
            row, slot = divmod(pair, routing.k)
            parts[row, slot] = Mlp(up, down, layer.act)(x[row : row + 1])[0]
    for row in range(len(x)):
        total = torch.zeros(32)
        for slot in range(routing.k):
            total = total + parts[row, slot] * routes.weights[row, slot]
        assert torch.equal(layer(x)[row], total + out[row])


def test_equal_router_scores_choose_the_expert_with_the_lower_id():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert best(scores, 3).tolist() == [[1, 2, 4], [0, 1, 2]]


def test_a_router_that_cannot_choose_is_refused():
    with pytest.raises(RuleError, match="k=9 of 8 experts"):
        Routing(9, 8)
    with pytest.raises(RuleError, match="1 of 3 groups"):
        Routing(2, 8, groups=3)


def test_pooling_does_not_depend_on_the_batch():
    hidden = noise(90, 72)
    for how in ("last", "mean", "first"):
        together = layers.pool(OPS, hidden, [0, 3, 77, 90], how)
        torch.set_num_threads(2)
        assert torch.equal(layers.pool(OPS, hidden[3:77], [0, 74], how)[0], together[1])
        torch.set_num_threads(1)
        assert (together * together).sum(-1).sub(1).abs().max() < 1e-6
    assert layers.pool(OPS, hidden, [0], "mean").shape == (0, 72)


# ---- model folders with wrong contents


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """The folder of a llama of two layers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    folder = tmp_path_factory.mktemp("good")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(good, tmp_path) -> Path:
    """A copy of the good folder, to be spoiled."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def change(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def rewrite(folder: Path, change_tensors) -> None:
    tensors = load_file(folder / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> dict[str, str]:
    """Splits the weights over two files. Returns the index."""
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    index = {}
    for n, part in enumerate((tensors[:9], tensors[9:])):
        save_file(dict(part), folder / f"model-{n}.safetensors")
        index |= {name: f"model-{n}.safetensors" for name, _ in part}
    write_index(folder, index)
    return index


def write_index(folder: Path, index: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def test_weight_files_without_tensors_are_refused_for_a_config_without_sizes(folder):
    """Having no tensor to compare with is not the same as having weights made at random."""
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({}, folder / "model.safetensors")
    with pytest.raises(RuleError, match="the weights are exactly those"):
        load(folder)


def test_whole_and_sharded_folders_give_the_same_model(good, folder):
    shard(folder)
    hidden = noise(3, 32)
    (one, info), (two, _) = load(good), load(folder)
    assert torch.equal(one.logits(hidden), two.logits(hidden))
    assert (info.model_type, info.vocab_size, info.eos_token_ids) == ("llama", 50, (2,))
    assert one.generates
    assert info.device == ("cpu", "computes in float32, its default")
    asked = EngineConfig(dtype="float32", device="cpu")
    assert load(good, asked).info.device == ("cpu", "computes in float32, as requested")


def test_half_precision_files_are_widened_exactly(folder):
    rewrite(folder, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    model = load(folder).model
    assert torch.equal(model.embedding.weight, weight.float())


@pytest.mark.parametrize("part", [0.3, 0.999])
def test_a_truncated_file_is_refused(folder, part):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(
        RuleError,
        match=r"model.safetensors is a complete safetensors file; got .*Download it again",
    ):
        load(folder)


def test_garbage_in_place_of_weights_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)
    with pytest.raises(RuleError, match="complete safetensors file"):
        load(folder)


def test_missing_extra_and_misshapen_tensors_are_named(folder):
    def spoil(t: dict[str, Tensor]) -> None:
        for name in [n for n in t if "layers.1.mlp" in n or "layers.1.self_attn" in n]:
            del t[name]
        t["model.norm.weight"] = torch.zeros(31)
        t["evil.weight"] = torch.zeros(3)

    rewrite(folder, spoil)
    with pytest.raises(RuleError) as error:
        load(folder)
    text = str(error.value)
    assert "7 missing: model.layers.1.self_attn.q_proj.weight" in text
    assert "and 3 more" in text
    assert "1 misshapen: model.norm.weight is [31], not [32]" in text
    assert "1 unknown to the model: evil.weight" in text


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**30},
        {"vocab_size": 10**12},
        {"hidden_size": 10**15},
        {"head_dim": 10**11},
        {"num_attention_heads": 10**9},
        {"intermediate_size": -5},
        {"num_hidden_layers": "many"},
        {"num_hidden_layers": True},
        {"vocab_size": 1e6},
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(folder, values):
    change(folder, **values)
    with pytest.raises(
        RuleError,
        match=f"{next(iter(values))} in config.json is from 1 to (50|21): the files hold 21 "
        "tensors with dimensions up to 50",
    ):
        load(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 20},
        {"num_attention_heads": 7, "head_dim": 16},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"hidden_act": "evil"},
        {"rms_norm_eps": "small"},
        {"rope_parameters": {"rope_type": "evil", "rope_theta": 1.0}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e15}},
        {"rope_parameters": [1, 2]},
        {"num_key_value_heads": 3},
        {"tie_word_embeddings": "perhaps"},
    ],
)
def test_configs_that_fit_no_model_are_refused(folder, values):
    change(folder, **values)
    with pytest.raises(RuleError):
        load(folder)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"rms_norm_eps": float("nan")},
            "numbers in config.json are finite; got NaN. Check the file.",
        ),
        (
            {"rms_norm_eps": float("inf")},
            "numbers in config.json are finite; got Infinity. Check the file.",
        ),
        (
            {"rms_norm_eps": -1e-6},
            "rms_norm_eps in config.json is a number, 0 or above; got -1e-06. Check the file.",
        ),
        (
            {"rms_norm_eps": "1e-6"},
            "rms_norm_eps in config.json is a number, 0 or above; got '1e-6'. Check the file.",
        ),
        (
            {"rms_norm_eps": None},
            "rms_norm_eps in config.json is a number, 0 or above; got None. Check the file.",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
            "numbers in config.json are finite; got NaN. Check the file.",
        ),
        (
            {"some": [{"list": [1, float("-inf")]}]},
            "numbers in config.json are finite; got -Infinity. Check the file.",
        ),
        *(
            (
                {"max_position_embeddings": value},
                "max_position_embeddings in config.json is a whole number from 1 to 2147483647; "
                f"got {value!r}. Check the file.",
            )
            for value in (0, -1, 2**31, 512.0, True, "512", None)
        ),
        *(
            (
                {key: 0},
                f"{key} in config.json is from 1 to {21 if key == 'num_hidden_layers' else 50}: "
                "the files hold 21 tensors with dimensions up to 50; got 0. Check that config and "
                "weights belong together.",
            )
            for key in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
            )
        ),
        (
            {"eos_token_id": 50},
            "eos_token_id in config.json names tokens from 0 to 49; got 50. Correct the file.",
        ),
        (
            {"eos_token_id": [2, -1]},
            "eos_token_id in config.json names tokens from 0 to 49; got -1. Correct the file.",
        ),
    ],
    ids=str,
)
def test_a_config_value_that_describes_no_model_is_named(folder, values, line):
    (folder / "generation_config.json").unlink()
    change(folder, **values)
    with pytest.raises(RuleError) as error:
        load(folder)
    assert str(error.value) == line


@pytest.mark.parametrize("eos", [50, [2, 50], 10**30, True, "2", [None], 2.0])
def test_an_end_token_that_the_model_does_not_have_is_refused(folder, eos):
    """With min_tokens it used to be an index outside the logits, which failed the step of every
    request."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    wrong = eos[-1] if isinstance(eos, list) else eos
    with pytest.raises(RuleError) as error:
        load(folder)
    assert (
        str(error.value)
        == f"eos_token_id in generation_config.json names tokens from 0 to 49; got {wrong!r}. "
        "Correct the file."
    )


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_a_file_that_is_not_utf8_is_named(folder, name):
    (folder / name).write_bytes(b'{"a": "\xff"}')
    with pytest.raises(RuleError) as error:
        load(folder)
    assert (
        str(error.value)
        == f"{name} is text in UTF-8; got byte 0xFF at 7. Download the model again."
    )


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "sub/../model-0.safetensors",
        "..",
        "",
        "model-0.safetensors/",
    ],
)
def test_an_index_cannot_name_a_file_outside_the_folder(folder, name):
    index = shard(folder)
    shutil.copy(folder / "model-0.safetensors", folder.parent / "outside.safetensors")
    write_index(folder, {**index, "model.norm.weight": name})
    with pytest.raises(RuleError, match="a model's files are inside its folder"):
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_link_out_of_the_folder_is_refused(folder, name):
    (folder / name).touch()
    (folder / name).rename(folder.parent / "outside")
    (folder / name).symlink_to(folder.parent / "outside")
    with pytest.raises(RuleError, match="Replace the link by the file"):
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_link_to_itself_is_refused(folder, name):
    """Python's own error, with a path and no remedy, used to be raised."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name)
    with pytest.raises(RuleError):
        load(folder)


def test_links_of_the_hub_cache_into_its_blobs_are_followed(folder):
    blobs, snapshot = folder.parent / "repo" / "blobs", folder.parent / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert load(snapshot).info.vocab_size == 50


def test_an_index_that_names_a_missing_tensor_or_file_is_refused(folder):
    index = shard(folder)
    write_index(folder, {**index, "model.norm.weight": "model-0.safetensors"})
    with pytest.raises(
        RuleError,
        match=r"a file holds the tensors that the index names; got model-0.safetensors without "
        r"model.norm.weight",
    ):
        load(folder)
    write_index(folder, {**index, "model.norm.weight": "model-7.safetensors"})
    with pytest.raises(
        RuleError, match=r"an index names safetensors files that exist; got model-7.safetensors"
    ):
        load(folder)
    write_index(folder, {**index, "model.norm.weight": "config.json"})
    with pytest.raises(RuleError, match=r"safetensors files that exist; got config.json"):
        load(folder)


def test_a_tensor_in_two_files_is_refused(folder):
    shard(folder)
    tensors = load_file(folder / "model-1.safetensors")
    save_file(
        {
            **load_file(folder / "model-0.safetensors"),
            "model.norm.weight": tensors["model.norm.weight"],
        },
        folder / "model-0.safetensors",
    )
    with pytest.raises(RuleError, match=r"a tensor is in one file only; got model.norm.weight"):
        load(folder)


class Bomb:
    """Creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_pickled_weights_are_refused_unread(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(RuleError, match=r"pickled ones can run code; got pytorch_model.bin"):
        load(folder)
    assert not (folder / "exploded").exists()


def test_code_in_the_folder_does_not_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name in ("configuration_evil.py", "modeling_evil.py"):
        (folder / name).write_text("import os\nos.mkdir('exploded')\nclass Evil: ...\n")
    change(
        folder,
        auto_map={
            "AutoConfig": "configuration_evil.Evil",
            "AutoModelForCausalLM": "modeling_evil.Evil",
        },
    )
    assert load(folder).info.vocab_size == 50
    change(folder, model_type="evil")
    with pytest.raises(RuleError, match="model_type is one of"):
        load(folder)
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("name", ["mixtral", "lama", "gemma3", "zzz", None])
def test_an_unknown_model_type_is_refused_with_the_known_ones(folder, name):
    """mixtral is not mistral: a checkpoint's type cannot be changed, so no similar type is
    suggested."""
    change(folder, model_type=name)
    with pytest.raises(RuleError) as error:
        load(folder)
    rule = f"model_type is one of {', '.join(model_types())}"
    assert str(error.value) == f"{rule}; got {name!r}. Use a checkpoint of one of these."


@pytest.mark.parametrize("name", ["weights", "../llama", "llama.py", "os"])
def test_a_model_type_cannot_name_another_python_module(folder, name):
    change(folder, model_type=name)
    with pytest.raises(RuleError, match="model_type is one of"):
        load(folder)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "[" * 100_000, '{"model_type": NaN'])
def test_a_config_that_is_no_json_object_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(RuleError, match=r"config.json (is (a )?JSON|are finite)"):
        load(folder)


def test_quantised_weights_are_refused(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}))
    with pytest.raises(
        RuleError, match=r"weights are floating point; got 1 others: model.norm.weight is I8"
    ):
        load(folder)
    change(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(RuleError, match=r"quantised ones \(fp8\)"):
        load(folder)


def test_a_folder_without_a_model_and_an_invalid_name_are_refused(tmp_path):
    with pytest.raises(RuleError, match=r"a model folder holds config.json"):
        load(tmp_path)
    for name in ("no-such-thing", "../a/b", "/no/such/folder", "a/b/c"):
        with pytest.raises(RuleError, match="a folder or a hub id of the form owner/name"):
            load(name)


def test_only_weights_and_text_files_are_downloaded_from_the_hub(good, monkeypatch):
    asked = {}

    def download(repo: str, **options) -> str:
        asked.update(options, repo=repo)
        return str(good)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load("owner/name").info.vocab_size == 50
    assert asked["repo"] == "owner/name"
    assert not any(p.endswith((".bin", ".pt", ".py", "*")) for p in asked["allow_patterns"])


def test_a_dtype_that_has_no_proven_gemm_is_refused(good):
    with pytest.raises(RuleError, match="dtype on cpu is one of float32; got 'bfloat16'"):
        load(good, EngineConfig(dtype="bfloat16", device="cpu"))


class Operators(TorchDispatchMode):
    """Notes which operators torch is asked for, except those of `numpy()` and `from_numpy`, which
    keep the interpreter's lock."""

    LOCKED = ("aten.lift_fresh.default", "aten.detach.default")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) not in self.LOCKED:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", [tiny.LLAMA, tiny.QWEN3], ids=lambda model: model.name)
def test_a_decoder_layer_calls_no_operator_of_torch(monkeypatch, model):
    """Each of them releases the interpreter's lock, and a thread that runs Python gives it back
    after 5 ms: two operators per layer left a prefill 0.16 of its speed."""
    right, seen = decoder.Block.__call__, list[list[str]]()

    def watched(*args):
        with Operators() as operators:
            out = right(*args)
        seen.append(operators.names)
        return out

    monkeypatch.setattr(decoder.Block, "__call__", watched)
    engine = Engine(EngineConfig(max_total_tokens=256), tiny.parts(model, cpu.Backend()))
    engine.add(tiny.words(20), SamplingParams(max_tokens=3, seed=0))
    while engine.busy:
        engine.step()
    assert len(seen) >= 6 and not any(seen), seen
