"""Models so small that a whole engine with one runs in a blink, random weights that matter, and an
alphabet to read them with.

One model per way to keep a cache: all keys, windows beside all keys, latent rows, windows with
sinks and experts. A model is what a config.json would say; its weights come from a generator.
Nothing is proven here about the machine (`certify` belongs to a real start): a cell must see a bug
by what comes out. The engine's cells and the random traces of `fuzz` share these.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.lab.options import CPU, Device
from lockstep.lab.plain import Checkpoint
from lockstep.llm.engine import Parts
from lockstep.models.loader import STATED, Info, Loaded
from lockstep.nn.source import WeightSource
from lockstep.run.certify import Certificate
from lockstep.text.tokenizer import Tokenizer
from lockstep.types import Choice

VOCAB = 61
CONTEXT = 160
EOS = 0
START = 1  # of an encoder-decoder's answers
WINDOW = 9
HIDDEN = 32
# names by which a checkpoint shows whether it is the trunk alone
PRESENT = frozenset({"model.embed_tokens.weight", "model.shared.weight", "bert.embeddings"})


@dataclass(frozen=True, eq=False)
class Tiny:
    """A model: `config` is what differs from COMMON in its config.json."""

    name: str
    description: str
    model_type: str
    config: Mapping[str, Any]


COMMON = {
    **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "head_dim": 8},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False},
    **{"tie_word_embeddings": True, "max_position_embeddings": CONTEXT},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 16, "v_head_dim": 8},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "rope_interleave": True},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_routed_experts": 4},
    **{"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"norm_topk_prob": True, "routed_scaling_factor": 1.5},
}
EXPERTS = {
    **{"attention_bias": True, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
}
CAPS = {
    **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8},
    **{"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    "use_bidirectional_attention": False,
}
SOURCES = {
    **{"d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "scale_embedding": True},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "activation_function": "gelu"},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 4},
}

LLAMA = Tiny("llama", "full attention in every layer", "llama", {})
QWEN3 = Tiny(
    "qwen3", f"a window of {WINDOW} in one layer, full attention in the other", "qwen3", WINDOWS
)
DEEPSEEK = Tiny("deepseek-v3", "latent attention (MLA), experts", "deepseek_v3", LATENT)
GPT_OSS = Tiny(
    "gpt-oss",
    f"sinks, a window of {WINDOW} in one layer, experts",
    "gpt_oss",
    {**WINDOWS, **EXPERTS},
)
BART = Tiny("bart", "an encoder, and cross attention to its rows", "bart", SOURCES)
GEMMA2 = Tiny(
    "gemma2",
    f"soft caps that bind, on scores and logits, and a window of {WINDOW}",
    "gemma2",
    {**WINDOWS, **CAPS},
)
MODELS = (LLAMA, QWEN3, DEEPSEEK, GPT_OSS, GEMMA2, BART)


def words(count: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt: tokens as random as they come, never EOS."""
    rng = random.Random(seed)
    return tuple(rng.randrange(EOS + 1, VOCAB) for _ in range(count))


def loaded(
    tiny: Tiny, device: Device = CPU, record: dict[str, Tensor] | None = None, seed: int = 3
) -> Loaded:
    """The model with random weights, which `record` gets by name, and what the engine must know."""
    gen = torch.Generator().manual_seed(seed)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=gen)
        scale = 0.5 if "embed" in name else 1.5 / shape[-1] ** 0.5
        tensor = (1 + 0.1 * noise if "norm" in name else noise * scale).to(device.compute)
        if record is not None:
            record[name] = tensor.clone()
        return tensor.float().to(device.place)

    config = {**COMMON, **tiny.config, "model_type": tiny.model_type}
    return assembled(config, take, (EOS,), device)


def assembled(
    config: Mapping[str, Any],
    take: Callable[..., Tensor],
    eos_token_ids: tuple[int, ...] = (),
    device: Device = CPU,
) -> Loaded:
    """A model of a config, its tensors from `take(name, shape)`, and what the engine must know."""
    weights = WeightSource(take, lambda _: None, PRESENT, device.ops)
    kind = import_module(f"lockstep.models.{config['model_type']}")
    model = kind.describe(SimpleNamespace(**config)).build(weights)
    info = Info(
        model_type=config["model_type"],
        folder=Path("tiny"),
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        max_position=model.max_position,
        bos_token_id=None,
        eos_token_ids=eos_token_ids,
        decoder_start_token_id=START,
        generates=model.generates,
        encoder=config["model_type"] == "bart",
        device=Choice(device.name, "the lab's choice"),
    )
    return Loaded(model, info)


def configs(file: str) -> dict[str, dict[str, Any]]:
    """The configs of a file beside this one, by name: what each differs in from `common`."""
    doc = json.loads((files("lockstep.lab") / file).read_text(encoding="utf-8"))
    return {name: {**doc["common"], **mine} for name, mine in doc["models"].items()}


def checkpoint(tiny: Tiny, device: Device = CPU, seed: int = 3) -> Checkpoint:
    """The same model as a folder holds it: every field of its config, its tensors by name."""
    tensors: dict[str, Tensor] = {}
    loaded(tiny, record=tensors, seed=seed)
    tensors = {name: tensor.to(device.compute) for name, tensor in tensors.items()}
    return Checkpoint({**COMMON, **tiny.config, "model_type": tiny.model_type}, tensors)


def parts(tiny: Tiny, backend: Backend, device: Device = CPU) -> Parts:
    """What an engine is made of, with nothing proven about the machine, and with an alphabet."""
    model, info = loaded(tiny, device)
    return Parts(
        model=model,
        info=info,
        tokenizer=Letters(),
        backend=backend,
        attention=Choice("cpu", "the lab's choice"),
        certificate=Certificate(0, (), "none"),
    )


def save(tiny: Tiny, folder: Path, **generation: Any) -> None:
    """The model as a folder that `models.loader` can load; `generation` is what its
    generation_config.json says."""
    tensors: dict[str, Tensor] = {}
    loaded(tiny, record=tensors)
    stated = {
        "model_type": tiny.model_type,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "is_encoder_decoder": False,
    }
    config = {**COMMON, **tiny.config, **stated, STATED: True}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


class Letters(Tokenizer):
    """Tokens of one to three bytes: letters, pairs that make up longer words, and the
    bytes of é, € and 😀 one by one.

    So a character takes up to four tokens, most tokens are a beginning of something, and what is no
    UTF-8 becomes U+FFFD. As with many tokenizers EOS stands before a text that is encoded, it has
    no text itself, and a space that begins a text is taken off.
    """

    TOKENS = (
        b"",
        *(bytes([b]) for b in b"abcdefghijklmnopqrstuvwxyz .,;:-"),
        *("é".encode()[i : i + 1] for i in range(2)),
        *("€".encode()[i : i + 1] for i in range(3)),
        *("😀".encode()[i : i + 1] for i in range(4)),
        *(b"th", b"he", b"in", b"er", b"an", b"re", b"on", b"at", b"en", b"nd", b"ti", b"es"),
        *(b"or", b"te", b"of", b"ed", b"is", b"it"),
        b"the",
    )

    byte_ids: frozenset[int] = (
        frozenset()
    )  # a byte here is decoded with its neighbours, not as part of a run

    def __init__(self) -> None:
        self.vocab_size = VOCAB

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Byte by byte, EOS before it if special tokens are wanted."""
        return [
            *([EOS] if add_special else []),
            *(self.TOKENS.index(bytes([b])) for b in text.encode()),
        ]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The bytes of all tokens, read as UTF-8 together, without the space at the beginning."""
        return self.spell(ids).decode("utf-8", "replace").removeprefix(" ")

    @classmethod
    def spell(cls, ids: Sequence[int]) -> bytes:
        """The bytes of all tokens."""
        return b"".join(cls.TOKENS[i] if i < len(cls.TOKENS) else b"?" for i in ids)

    @cached_property
    def continuation_ids(self) -> tuple[int, ...]:
        """Every byte of é, € and 😀 but the first."""
        return tuple(
            i for i, token in enumerate(self.TOKENS) if len(token) == 1 and 0x80 <= token[0] < 0xC0
        )
