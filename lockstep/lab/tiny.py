"""Models small enough that a whole engine runs in a blink, with random weights that matter and an
alphabet as tokenizer. A model is what its config.json would say; there is one per way to keep a
cache. They skip certification: a cell must detect a bug by its outputs."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.lab import table
from lockstep.lab.options import CPU, Device
from lockstep.lab.plain import Checkpoint
from lockstep.llm.engine import Parts
from lockstep.models.loader import STATED, Info, Loaded
from lockstep.nn.layers import WeightSource
from lockstep.text import Tokenizer
from lockstep.types import Choice

EOS = 0
START = 1  # first token of an encoder-decoder's answers
# names that tell whether a checkpoint is the trunk alone
PRESENT = frozenset({"model.embed_tokens.weight", "model.shared.weight", "bert.embeddings"})


def configs(file: str) -> dict[str, dict[str, Any]]:
    """Returns the configs of a file beside this one, by name: `common` with their changes."""
    doc = table(file)
    return {name: {**doc["common"], **mine} for name, mine in doc["models"].items()}


CONFIGS = configs("tiny_models.json")  # by model_type
COMMON = CONFIGS["llama"]
VOCAB, CONTEXT = COMMON["vocab_size"], COMMON["max_position_embeddings"]
HIDDEN, WINDOW = COMMON["hidden_size"], CONFIGS["qwen3"]["sliding_window"]


@dataclass(frozen=True, eq=False)
class Tiny:
    """A model: fields that its `config` does not state are those of COMMON."""

    name: str
    description: str
    model_type: str
    config: Mapping[str, Any]

    @property
    def stated(self) -> dict[str, Any]:
        return {**COMMON, **self.config, "model_type": self.model_type}


MODELS = tuple(
    Tiny(name.replace("_", "-"), about.format_map(CONFIGS[name]), name, CONFIGS[name])
    for name, about in table("tiny_models.json")["about"].items()
)
LLAMA, QWEN3, DEEPSEEK, GPT_OSS, GEMMA2, BART = MODELS


def words(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(EOS + 1, VOCAB) for _ in range(count))


def checkpoint(tiny: Tiny, device: Device = CPU) -> Checkpoint:
    """Returns a model as a folder contains it: every config field, random tensors by name."""
    gen, tensors = torch.Generator().manual_seed(3), dict[str, Tensor]()
    for name, shape in shapes(tiny.stated).items():
        noise = torch.randn(shape, generator=gen)
        scale = 0.5 if "embed" in name else 1.5 / shape[-1] ** 0.5
        tensor = 1 + 0.1 * noise if "norm" in name else noise * scale
        tensors[name] = tensor.to(device.compute)
    return Checkpoint(tiny.stated, tensors)


def loaded(tiny: Tiny, device: Device = CPU) -> Loaded:
    """Returns the same model in memory, with the info that an engine needs."""
    tensors = checkpoint(tiny, device).tensors

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        return tensors[name].float().to(device.place)

    return assembled(tiny.stated, take, (EOS,), device)


def assembled(
    config: Mapping[str, Any],
    take: Callable[..., Tensor],
    eos_token_ids: tuple[int, ...] = (),
    device: Device = CPU,
) -> Loaded:
    """Builds a config's model, tensors from `take(name, shape)`, and what an engine must know."""
    weights = WeightSource(take, lambda _: None, PRESENT, device.ops)
    kind = import_module(f"lockstep.models.{config['model_type']}")
    model = kind.describe(SimpleNamespace(**config)).build(weights)
    info = Info(
        model_type=config["model_type"],
        folder=Path("tiny"),
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        max_position=model.max_position,
        eos_token_ids=eos_token_ids,
        decoder_start_token_id=START,
        device=Choice(device.name, "the lab's choice"),
    )
    return Loaded(model, info)


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the tensor shapes, by name, that a config's model reads from its checkpoint."""
    asked: dict[str, tuple[int, ...]] = {}

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        asked[name] = shape
        return torch.empty(shape, device="meta")

    assembled(config, take)
    return asked


def parts(tiny: Tiny, backend: Backend, device: Device = CPU) -> Parts:
    """Returns the parts of an engine, without a certificate of this machine, with an alphabet."""
    model, info = loaded(tiny, device)
    return Parts(
        model=model,
        info=info,
        tokenizer=Letters(),
        backend=backend,
        attention=Choice("cpu", "the lab's choice"),
        certificate="none",
    )


def save(tiny: Tiny, folder: Path, device: Device = CPU, **generation: Any) -> None:
    """Writes the model as a folder for `models.loader`, with this generation_config.json."""
    ends = {"eos_token_id": EOS, "bos_token_id": None, "is_encoder_decoder": False}
    config = {**tiny.stated, **ends, STATED: True}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    save_file(dict(checkpoint(tiny, device).tensors), folder / "model.safetensors")


class Letters(Tokenizer):
    """Tokens of one to three bytes: letters, pairs of letters, and the bytes of é, €, and 😀, so a
    character takes up to 4 tokens. As with many tokenizers, encoding puts EOS, which has no text,
    before the text, and decoding drops a space at the beginning."""

    TOKENS = (
        b"",
        *(bytes([b]) for b in "abcdefghijklmnopqrstuvwxyz .,;:-é€😀".encode()),
        *b"th he in er an re on at en nd ti es or te of ed is it the".split(),
    )

    # bytes are decoded with their neighbours, not in runs of byte tokens
    byte_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.vocab_size = VOCAB

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        letters = [self.TOKENS.index(bytes([b])) for b in text.encode()]
        return [EOS, *letters] if add_special else letters

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes the bytes of all tokens together as UTF-8, without a space at the beginning."""
        return self.spell(ids).decode("utf-8", "replace").removeprefix(" ")

    @classmethod
    def spell(cls, ids: Sequence[int]) -> bytes:
        return b"".join(cls.TOKENS[i] if i < len(cls.TOKENS) else b"?" for i in ids)

    @cached_property
    def continuation_ids(self) -> tuple[int, ...]:
        """The tokens of every byte of é, € and 😀 but the first."""
        later = [bytes([b]) for b in range(0x80, 0xC0)]
        return tuple(i for i, token in enumerate(self.TOKENS) if token in later)
