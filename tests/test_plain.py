"""The lab's plain float64 models against transformers: every model type, every option of a config.

Each is compared twice. Once with transformers in float64, its own casts to float32 lifted: only
float64 roundings remain, so a formula that differs shows. And once as it is shipped, in float32.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import randomise
from test_models import CASES, SMALL, YARN, tokens
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.lab import plain
from lockstep.models.loader import model_types

FOLDER = Path(plain.__file__).parent
LENGTH = 61  # longer than every window
DOUBLES = 1e-9
SHIPPED = 1e-5


class Lifted(TorchFunctionMode):
    """Gives float64 wherever float32 is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(self.lift, args), **{k: self.lift(v) for k, v in (kwargs or {}).items()})

    @staticmethod
    def lift(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value


@contextmanager
def doubles() -> Iterator[None]:
    """Makes float64 torch's only floating-point dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        with Lifted(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
BETAS = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}


def variant(model_type: str, **changes: Any) -> tuple[str, str, dict[str, Any]]:
    """Returns a case of test_models with other options."""
    config_class, model_class, common = CASES[model_type]
    return config_class, model_class, {**common, **changes}


VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **CASES,
    "llama, no bias, tied, heads wider than the rows": variant(
        "llama",
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        head_dim=24,
        rope_parameters=None,
    ),
    "llama, linear": variant("llama", rope_parameters=LINEAR),
    "llama, dynamic within max_position": variant("llama", rope_parameters=DYNAMIC),
    "llama, dynamic beyond max_position": variant(
        "llama", rope_parameters=DYNAMIC, max_position_embeddings=26
    ),
    "llama, a part of the columns asked for": variant(
        "llama",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "llama, yarn": variant("llama", rope_parameters=YARN),
    "llama, yarn, betas": variant("llama", rope_parameters={**YARN, **BETAS}),
    "llama, yarn without a factor": variant("llama", rope_parameters={**YARN, "factor": None}),
    "llama, one key head, gelu": variant("llama", num_key_value_heads=1, hidden_act="gelu"),
    "llama, relu": variant("llama", hidden_act="relu"),
    "llama, gelu_new, eps": variant("llama", hidden_act="gelu_new", rms_norm_eps=1e-3),
    "llama, the trunk alone": ("LlamaConfig", "LlamaModel", {}),
    "mistral, no window": variant("mistral", sliding_window=None),
    "qwen2, no window, untied": variant(
        "qwen2", use_sliding_window=False, tie_word_embeddings=False
    ),
    "qwen3, windows, bias": variant(
        "qwen3", use_sliding_window=True, sliding_window=5, max_window_layers=1, attention_bias=True
    ),
    "qwen3_moe, every other layer, not normed, windows, bias": variant(
        "qwen3_moe",
        norm_topk_prob=False,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=5,
        attention_bias=True,
    ),
    "gemma2, untied, no caps, bias": variant(
        "gemma2",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    "gemma3_text, capped logits, bias": variant(
        "gemma3_text", final_logit_softcapping=7.0, attention_bias=True
    ),
    "gpt_oss, no bias, plain rope, another gate": variant(
        "gpt_oss",
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        swiglu_alpha=1.2,
        swiglu_limit=0.7,
    ),
    "deepseek_v2, greedy, low-rank queries, biases": variant(
        "deepseek_v2", q_lora_rank=40, topk_method="greedy", mlp_bias=True, attention_bias=True
    ),
    "deepseek_v3, halves, one group, yarn, not normed": variant(
        "deepseek_v3",
        q_lora_rank=None,
        rope_interleave=False,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        attention_bias=False,
        rope_parameters={**YARN, "mscale_all_dim": 1.0},
    ),
    "bart, unscaled, relu": variant("bart", scale_embedding=False, activation_function="relu"),
    "bert, masked language model, tanh gelu": (
        "BertConfig",
        "BertForMaskedLM",
        {"hidden_act": "gelu_new"},
    ),
}


@dataclass(frozen=True)
class Twin:
    """transformers' model with random weights, and its checkpoint for the plain model."""

    name: str
    make: Callable[[], Any]
    reference: Any
    checkpoint: plain.Checkpoint

    def compare(self, model: Any) -> float:
        """Returns the largest difference of logits, or of rows where there is no head."""
        ids, source = tokens(LENGTH), tokens(23, seed=3)
        if self.checkpoint.config["model_type"] == "bart":
            want = model(torch.tensor([source]), decoder_input_ids=torch.tensor([ids])).logits
            have = plain.logits(self.checkpoint, ids, source)
        elif hasattr(model, "lm_head"):
            want, have = model(torch.tensor([ids])).logits, plain.logits(self.checkpoint, ids)
        else:
            want = getattr(model, "bert", model)(torch.tensor([ids])).last_hidden_state
            have = plain.hidden_states(self.checkpoint, ids)
        assert have.dtype is torch.float64
        assert want.abs().max() > 1, "a reference that says nothing"
        return float((have - want[0]).abs().max())


def twin(name: str, folder: Path) -> Twin:
    import transformers
    from safetensors.torch import load_file

    transformers.utils.logging.disable_progress_bar()
    config_class, model_class, changes = VARIANTS[name]
    config = getattr(transformers, config_class)(**{**sizes(config_class), **changes})
    config._attn_implementation = config._experts_implementation = "eager"

    def make() -> Any:
        return getattr(transformers, model_class)(config).eval()

    reference = gentle(randomise(make()))
    reference.save_pretrained(folder)
    return Twin(
        name,
        make,
        reference,
        plain.Checkpoint(stated(config), load_file(folder / "model.safetensors")),
    )


def sizes(config_class: str) -> dict[str, Any]:
    """Returns SMALL, of which bart names all but two otherwise."""
    common = ("vocab_size", "max_position_embeddings")
    return {k: v for k, v in SMALL.items() if k in common or config_class != "BartConfig"}


def gentle(model: Any) -> Any:
    """Narrows the scores to width 1: float32 itself is then within SHIPPED of the truth."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                p.mul_(0.5)
    return model


def stated(config: Any) -> Mapping[str, Any]:
    """Returns every field of a config, and the context length for which a dynamic rope is made."""
    return {**config.to_dict(), "model_type": config.model_type, "context_length": LENGTH}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_plain_model_has_the_values_of_transformers(name: str, tmp_path: Path):
    case = twin(name, tmp_path)
    with torch.no_grad():
        shipped = case.compare(case.reference)
    with doubles():
        exact = case.make()
        exact.load_state_dict(case.reference.state_dict())
        lifted = case.compare(exact)
    print(f"\n{name}: {lifted:.2e} with casts lifted, {shipped:.2e} as shipped")
    assert lifted <= DOUBLES
    assert shipped <= SHIPPED


def test_every_model_type_has_a_plain_model():
    assert sorted(plain.MODEL_TYPES) == model_types()
    assert set(CASES) <= set(VARIANTS)


FORBIDDEN = (
    "nn",
    "models",
    "kernels",
    "attention",
    "kv",
    "plan",
    "run",
    "sched",
    "sample",
    "llm",
    "spec",
    "serve",
)


def imported(source: str) -> Iterator[str]:
    """Yields the modules that a source text imports, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Name):
            assert node.id not in ("__import__", "import_module", "importlib"), "in disguise"


def test_the_source_of_the_plain_models_imports_nothing_of_the_engine():
    files = sorted(FOLDER.rglob("*.py"))
    assert [file.name for file in files] == ["__init__.py", "layers.py"]
    names = [name for file in files for name in imported(file.read_text("utf-8"))]
    ours = [name for name in names if name.split(".")[0] == "lockstep"]
    assert ours and all(n.startswith("lockstep.lab.plain") for n in ours), ours


def test_the_plain_models_run_where_the_engine_cannot_be_imported():
    names = [f"lockstep.{unit}" for unit in FORBIDDEN]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({names}))
import torch
from lockstep.lab import plain
from lockstep.lab.plain import layers
config = dict(model_type="llama", num_hidden_layers=0, tie_word_embeddings=True, rms_norm_eps=1e-6)
tensors = {{"model.embed_tokens.weight": torch.eye(4), "model.norm.weight": torch.ones(4)}}
print(plain.logits(plain.Checkpoint(config, tensors), [2]).argmax().item())
try:
    import lockstep.nn.rope
except ImportError:
    print("blocked")
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=FOLDER.parents[2],
    )
    assert run.stdout.split() == ["2", "blocked"], run.stderr
