"""EAGLE-3 heads: the differences from `eagle.py`.

`fc` joins the states after three layers of the target. The layer reads the token's embedding and
`fc`'s output side by side, each normed. A norm and an lm_head of the head's own follow; the lm_head
has some of the target's tokens: draft token i is token i + d2t[i], and t2d marks those tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lockstep.nn.layers import RMSNorm, RMSSpec, WeightSource
from lockstep.ops import concat
from lockstep.spec.draft import DraftModel, DraftSetup
from lockstep.spec.eagle import Head, Raw, decoder, load_head
from lockstep.types import RuleError, format_value

ARCHITECTURE = "LlamaForCausalLMEagle3"
BUILTIN = Path(__file__).parent.parent / "builtin"
LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, eq=False)
class Eagle3(Head):
    """`token_ids` int64 [draft vocabulary]: the target's tokens that it knows."""

    architecture, layer, widths = ARCHITECTURE, "midlayer", (3, 2)

    input_norm: RMSNorm
    hidden_norm: RMSNorm
    norm: RMSNorm
    token_ids: Tensor

    @classmethod
    def build(cls, raw: Raw, config: Any, w: WeightSource, setup: DraftSetup) -> Self:
        d, vocab, layer = config.hidden_size, draft_vocab(raw, config.vocab_size), w.at(cls.layer)
        fused = fused_layers(raw, len(decoder(setup.target).blocks))
        norm = RMSSpec(config.rms_norm_eps)
        return cls(
            **cls.parts(raw, config, w, setup, fused),
            head=w.linear("lm_head", vocab, d),
            input_norm=norm.build(layer, "input_layernorm", d),
            hidden_norm=norm.build(layer, "hidden_norm", d),
            norm=norm.build(w, "norm", d),
            token_ids=token_ids(w, vocab, config.vocab_size),
        )

    def fuse(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def joined(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        both = self.input_norm(self.embedding(ids)), self.hidden_norm(hidden)
        return concat(both, -1), hidden

    def output(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm.add(hidden, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, d] → float32 [S, vocab], -inf for tokens that it does not know."""
        logits = super().logits(hidden).float()
        vocab_size = self.setup.target.info.vocab_size
        return self.ops.spread_columns(logits, self.token_ids, vocab_size)


def load(setup: DraftSetup) -> DraftModel:
    """Loads the head that `speculative_draft_model` names, or the built-in model's own."""
    path = setup.config.speculative_draft_model
    if path is None and setup.target.info.folder == BUILTIN:
        path = str(BUILTIN / "eagle3")
    return load_head(path, setup, Eagle3)


def fused_layers(raw: Raw, layers: int) -> tuple[int, ...]:
    """Returns three layers of the target: those that the config names, or the authors' choice."""
    config = raw.get("eagle_config")
    named = config.get(LAYERS) if isinstance(config, dict) else None
    ids = [1, layers // 2 - 1, layers - 4] if named is None else named
    whole = isinstance(ids, list) and all(type(i) is int and 0 <= i < layers for i in ids)
    if not whole or len(ids) != 3:
        rule = f"an EAGLE-3 head reads the states after three of the model's {layers} layers"
        raise RuleError(rule, format_value(ids), f"Name them in config.json, eagle_config.{LAYERS}")
    return tuple(ids)


def draft_vocab(raw: Raw, vocab_size: int) -> int:
    """Returns how many tokens the lm_head knows: all, unless the config gives a number."""
    size = raw.get("draft_vocab_size")
    if size is None:
        return vocab_size
    if type(size) is not int or not 1 <= size <= vocab_size:
        rule = f"draft_vocab_size is a whole number from 1 to the model's {vocab_size}"
        raise RuleError(rule, format_value(size), "Check config.json")
    return size


def token_ids(w: WeightSource, size: int, vocab_size: int) -> Tensor:
    """Returns int64 [size]: the target's token of every draft token; the same ids without maps, and
    where weights are drawn at random."""
    every = torch.arange(size, device=w.ops.device)
    if not w.names or (size == vocab_size and not w.has("d2t")):
        return every
    offsets, marks = w.tensor("d2t", size), w.tensor("t2d", vocab_size)
    if offsets.is_meta:
        return every
    ids, marked = every + offsets.long(), torch.nonzero(marks)[:, 0]
    if not torch.equal(ids.sort()[0], marked):
        rule = f"d2t leads to {size} tokens, each once, and t2d marks these"
        got = f"{len(set(ids.tolist()))} from {ids.min()} to {ids.max()}, {len(marked)} marked"
        raise RuleError(rule, got, "Download the head again")
    return ids
