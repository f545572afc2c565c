"""EAGLE heads: a decoder layer that continues a target's states, in the layout of their authors.

Row p of a head reads the token at p + 1 and the target's state at p or, where the target has not
computed it yet, the head's own. An EAGLE head joins the token's embedding and the target's last,
normed state by `fc`, has one layer without a norm before it, and uses the target's lm_head.
`eagle3.py` has the differences of EAGLE-3. Knows no request and no tree; `model_draft.py` runs it.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lockstep.folder import read_json
from lockstep.models import llama, loader
from lockstep.models.loader import Loaded
from lockstep.nn.attention import Attention, AttentionContext, Dense
from lockstep.nn.decoder import Decoder, Model
from lockstep.nn.layers import Embedding, Linear, RMSNorm, RMSSpec, WeightSource
from lockstep.nn.mlp import Mlp
from lockstep.ops import concat
from lockstep.run.kind import DRAFT, EXTEND
from lockstep.spec.draft import DraftModel, DraftSetup
from lockstep.types import RuleError, format_value

ARCHITECTURE = "LlamaForCausalLMEagle"
MAPS = ("d2t", "t2d")  # tensors of a head that are not weights
OTHERS = ("norm_before_residual", "norm_before_fc")  # config fields of other layouts

Raw = Mapping[str, Any]  # a config.json


@dataclass(frozen=True, eq=False)
class Head(Model):
    """One layer after the target's states; `hidden` and `states` are those of `DraftModel`."""

    architecture: ClassVar[str]
    layer: ClassVar[str]  # prefix of its weights' names
    widths: ClassVar[tuple[int, int]]  # input widths of `fc` and of the layer, in hidden sizes

    setup: DraftSetup
    target_layers: tuple[int, ...]
    hidden: Tensor
    states: Tensor
    embedding: Embedding
    fc: Linear
    attn: Dense
    mlp_norm: RMSNorm
    mlp: Mlp

    @classmethod
    @abstractmethod
    def build(cls, raw: Raw, config: Any, w: WeightSource, setup: DraftSetup) -> Self:
        """Builds it from config.json: `raw` as written, `config` with its family's defaults."""

    @classmethod
    def parts(
        cls, raw: Raw, config: Any, w: WeightSource, setup: DraftSetup, fused: tuple[int, ...]
    ) -> dict[str, Any]:
        """Returns all heads' fields, those above; this head reads after the layers `fused`."""
        layer, d, (fc_width, width) = w.at(cls.layer), config.hidden_size, cls.widths
        table, name = decoder(setup.target).embedding.weight, "embed_tokens.weight"
        if w.has(name):
            table = w.rows(name, config.vocab_size, d)
        bias = bool(getattr(config, "attention_bias", False))
        attn = replace(llama.attention(config), bias=bias, out_bias=bias)
        norm = RMSSpec(config.rms_norm_eps)
        zeros, n = partial(torch.zeros, dtype=w.ops.dtype, device=w.ops.device), len(fused)
        try:
            hidden, states = zeros(setup.rows, d), zeros(setup.rows, n * d)
        except RuntimeError as error:
            rule = f"there is memory for {setup.rows:,} rows of a head, {1 + n} x {d} numbers each"
            remedy = "Lower speculative_num_steps, speculative_eagle_topk or max_running_requests"
            raise RuleError(rule, str(error).splitlines()[0], remedy) from error
        return {
            "ops": w.ops,
            "max_position": config.max_position_embeddings,
            "setup": setup,
            "target_layers": fused,
            "hidden": hidden,
            "states": states,
            "embedding": Embedding(table, w.ops),
            "attn": attn.build(layer.at("self_attn"), 0, width=width * d),
            "fc": w.linear("fc", d, fc_width * d, bool(raw.get("bias", False))),
            "mlp_norm": norm.build(layer, "post_attention_layernorm", d),
            "mlp": llama.mlp(config).build(layer.at("mlp")),
        }

    @abstractmethod
    def fuse(self, states: Tensor) -> Tensor:
        """Maps the target's states of all `target_layers`, side by side, to rows of `hidden`."""

    @abstractmethod
    def joined(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the input of the layer's attention, and the residual."""

    @abstractmethod
    def output(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the input of `logits` after the layer, and the state that the next row reads."""

    def drafted(
        self, ids: Tensor, positions: Tensor, step: AttentionContext, _: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Computes rows of draft tokens, which read the head's own states."""
        hidden, residual = self.joined(self.hidden[: len(ids)], ids)
        hidden = self.attn(hidden, self.cos_sin(positions), step)
        hidden, residual = self.mlp_norm.add(hidden, residual)
        return self.output(self.mlp(hidden), residual)

    def extended(
        self, ids: Tensor, positions: Tensor, step: AttentionContext, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Computes rows that read the target's states. A chain's launch computes these rows again
        for every draft token, as `drafted`."""
        self.hidden[: len(ids)].copy_(self.fuse(self.states[: len(ids)]))
        return self.drafted(ids, positions, step, layers)

    def stored(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        """Stores only the keys of such rows: with one layer they do not depend on its output."""
        hidden = self.fuse(self.states[: len(ids)])
        self.attn.store(self.joined(hidden, ids)[0], self.cos_sin(positions), step)
        return hidden

    def __call__(self, ids: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        return self.drafted(ids, positions, step, ())[0]

    @property
    def draft(self) -> DraftModel:
        """The `DraftModel` of this head."""
        kind = self.setup.kind_of(self)
        kind = replace(kind, name=DRAFT, forward=self.drafted, hidden_layers=(0,))
        return DraftModel(
            kind=kind,
            extend=replace(kind, name=EXTEND, forward=self.extended),
            follow=replace(kind, name=EXTEND, forward=self.stored, hidden_layers=()),
            target_layers=self.target_layers,
            hidden=self.hidden,
            states=self.states,
        )

    @property
    def attentions(self) -> Sequence[Attention]:
        return [self.attn]


@dataclass(frozen=True, eq=False)
class Eagle(Head):
    """Uses the norm and the lm_head of `target`."""

    architecture, layer, widths = ARCHITECTURE, "layers.0", (2, 1)

    target: Decoder

    @classmethod
    def build(cls, raw: Raw, config: Any, w: WeightSource, setup: DraftSetup) -> Self:
        target = decoder(setup.target)
        w.skip(r"lm_head\.weight")
        parts = cls.parts(raw, config, w, setup, (len(target.blocks) - 1,))
        return cls(**parts, head=target.head, target=target)

    def fuse(self, states: Tensor) -> Tensor:
        return self.target.norm(states)

    def joined(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        both = self.fc(concat((self.embedding(ids), hidden), -1))
        return both, both

    def output(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden + residual
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, d] → [S, vocab]."""
        return self.target.logits(hidden)


def load(setup: DraftSetup) -> DraftModel:
    """Loads the head that `speculative_draft_model` names."""
    return load_head(setup.config.speculative_draft_model, setup, Eagle)


def decoder(target: Loaded) -> Decoder:
    """Returns the target's model, which a head continues."""
    if not isinstance(target.model, Decoder) or target.model.head is None:
        rule = "a head continues a decoder that generates"
        raise RuleError(rule, target.info.model_type, "Use another algorithm")
    return target.model


def load_head(path_or_id: str | None, setup: DraftSetup, head: type[Head]) -> DraftModel:
    """Loads the head in a folder or of a hub id, onto the target's device."""
    if path_or_id is None:
        rule = f"{setup.config.speculative_algorithm} drafts with a head, a folder or a hub id"
        raise RuleError(rule, "none", "Name it: speculative_draft_model")
    target, folder = decoder(setup.target), loader.local_folder(path_or_id)
    raw = read_json(folder, "config.json")
    loader.check_numbers(raw)
    check_config(raw, setup.target, head.architecture)
    entries = None if setup.config.load_format == "dummy" else loader.scan(folder, MAPS)
    if entries is not None:  # the vocabulary's size is the target's
        loader.check_sizes({**raw, "vocab_size": None}, entries)
    build = partial(head.build, raw, loader.parse_config(folder, raw), setup=setup)
    return loader.built(lambda: build, "a head", entries, target.ops)[0].draft


def check_config(raw: Mapping[str, Any], target: Loaded, architecture: str) -> None:
    """Raises unless this is the config of such a head, for this target."""
    if (named := raw.get("architectures")) != [architecture]:
        rule = f"the config.json of this head names the architecture {architecture}"
        raise RuleError(rule, format_value(named), "Use such a head, or another algorithm")
    info, hidden = target.info, raw.get("hidden_size")
    sizes = {
        "hidden_size": (hidden, info.hidden_size),
        "target_hidden_size": (raw.get("target_hidden_size", hidden), info.hidden_size),
        "vocab_size": (raw.get("vocab_size"), info.vocab_size),
    }
    for name, (size, wanted) in sizes.items():
        if size != wanted:
            rule = f"{name} of a head is that of the model that it drafts for, {wanted}"
            raise RuleError(rule, format_value(size), "Use the head that was made for this model")
    if raw.get("num_hidden_layers") != 1:
        rule = "a head has one layer"
        raise RuleError(rule, format_value(raw.get("num_hidden_layers")), "Use one of one layer")
    for name in OTHERS:
        if raw.get(name):
            rule = f"a head's config.json does not set {name}"
            raise RuleError(rule, format_value(raw[name]), "Use a head without it")
