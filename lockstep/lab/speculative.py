"""Speculation under the lab: drafts that are sometimes right and sometimes wrong (the target with
noise on its weights, or a random head that imitates it), and the options of every way to draft.

A `Recorder` checks that a proposal is a function of the tokens and the parameters, and of nothing
that happened before. The module knows tiny models; engine recipes, the fuzzer and tests use it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.lab import table
from lockstep.lab.options import CPU, Device
from lockstep.lab.tiny import COMMON, EOS, Tiny, assembled, checkpoint
from lockstep.models.loader import Loaded
from lockstep.nn.layers import WeightSource
from lockstep.sched.request import DraftTree
from lockstep.spec import draft_model, eagle, eagle3
from lockstep.spec.draft import Draft, DraftModel, DraftRequest, DraftSetup
from lockstep.spec.model_draft import ModelDraft

NOISE = 0.05  # relative to the weights' deviation, on every weight of a draft model
HEAD_NOISE = 0.3  # size of most weights of a head
OPTIONS: dict[str, dict[str, Any]] = table("speculative.toml")["tiny"]
NGRAM, CHAIN, EAGLE, EAGLE3, WIDE = OPTIONS.values()
TREE, EAGLE3_TREE = CHAIN | WIDE, EAGLE3 | WIDE
HEADS: dict[str, type[eagle.Head]] = {"eagle": eagle.Eagle, "eagle3": eagle3.Eagle3}


@lru_cache(maxsize=16)
def noisy(tiny: Tiny, scale: float = NOISE, device: Device = CPU, seed: int = 17) -> Loaded:
    """Returns the model with noise on its weights, `scale` times their standard deviation."""
    tensors = checkpoint(tiny, device).tensors
    generator = torch.Generator().manual_seed(seed)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        weight = tensors[name].float()
        noise = torch.randn(shape, generator=generator)
        worse = weight + scale * weight.std(correction=0) * noise
        return worse.to(device.compute).float().to(device.place)

    return assembled(tiny.stated, take, (EOS,), device)


def head(setup: DraftSetup, device: Device, seed: int = 23) -> DraftModel:
    """Returns a head that roughly repeats: the last token, or the token that the target's last
    state favours. Tied embeddings favour repetition, so it is right at times, and its noise makes
    it wrong at others."""
    kind, target = HEADS[str(setup.config.speculative_algorithm)], eagle.decoder(setup.target)
    raw = {**COMMON, "eagle_config": {eagle3.LAYERS: [0, 1, 1]}}
    generator = torch.Generator().manual_seed(seed)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        size = 1.0 if "self_attn" in name else HEAD_NOISE  # so that every key matters
        weight: Tensor = size * torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if "norm" in name:
            weight += 1
        if name == "fc.weight":  # EAGLE copies the embedding; EAGLE-3 the last state
            copied = weight[:, : shape[0]] if kind is eagle.Eagle else weight[:, -shape[0] :]
            copied += torch.eye(shape[0])
        if name == "lm_head.weight":
            weight += target.embedding.weight.float().cpu()
        return weight.to(device.compute).float().to(device.place)

    weights = WeightSource(take, lambda _: None, (), device.ops)
    return kind.build(raw, SimpleNamespace(**raw), weights, setup).draft


def drafts(tiny: Tiny, device: Device = CPU) -> Callable[[DraftSetup], DraftModel]:
    """Returns the function by which a tiny model's engine loads its draft."""

    def load(setup: DraftSetup) -> DraftModel:
        if setup.config.speculative_algorithm in HEADS:
            return head(setup, device)
        return draft_model.of(noisy(tiny, device=device), setup)

    return load


class RecordingModel:
    """A draft model whose logits are also appended to `said`."""

    def __init__(self, model: DraftModel, said: list[Tensor]) -> None:
        self.model, self.said = model, said

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def logits(self, hidden: Tensor) -> Tensor:
        self.said.append(self.model.logits(hidden))
        return self.said[-1]


class Recorder:
    """Records a draft. `known` maps tokens, parameters and size to the first proposal and the bits
    of its first guess's logits; `differing` describes later proposals that deviate from it."""

    def __init__(self, draft: Draft, known: dict[Any, Any]) -> None:
        self.draft, self.knows_chances, self.known = draft, draft.knows_chances, known
        self.observe, self.launched, self.lag = draft.observe, draft.launched, draft.lag
        self.differing: list[str] = []
        self.said: list[Tensor] = []
        if isinstance(draft, ModelDraft):
            heard: Any = RecordingModel(draft.model, self.said)
            draft.model = heard

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.said.clear()
        trees = self.draft.propose(requests)
        asks = [i for i, tree in enumerate(trees) if tree.token_ids]
        bits = dict.fromkeys(range(len(trees)), b"")
        if self.said and len(self.said[0]) == len(asks):
            rows = self.said[0].cpu().numpy()
            bits |= {i: row.tobytes() for i, row in zip(asks, rows, strict=True)}
        for i, (ask, tree) in enumerate(zip(requests, trees, strict=True)):
            if min(tree.token_ids, default=0) < 0:  # they have no values yet
                continue
            tokens, prompt_len = tuple(ask.request.tokens), len(ask.request.spec.prompt)
            known, heard = self.known.setdefault((tokens, prompt_len, *ask[1:]), (tree, bits[i]))
            if tree != known or (bits[i] != heard and bits[i] and heard):
                where = f"after {len(tokens)} tokens of request {ask.request.arrival}"
                self.differing.append(f"{where}: {tree.token_ids}, earlier {known.token_ids}")
        return trees
