"""Drafts by a separate model: a smaller one with the same vocabulary, which sees tokens alone.

Loaded like any other model, for the target's device. Knows the loader and what has to agree;
`spec.select` calls it, `model_draft` runs what it returns.
"""

from dataclasses import replace

from lockstep.models import loader
from lockstep.models.loader import Loaded
from lockstep.run.kind import DRAFTS
from lockstep.spec.draft import DraftModel, DraftSetup
from lockstep.types import RuleError


def load(setup: DraftSetup) -> DraftModel:
    """Loads the model that the options name, on the target's device and in its dtype."""
    dtype = str(setup.target.model.ops.dtype).removeprefix("torch.")
    config = replace(setup.config, device=setup.target.info.device.name, dtype=dtype)
    return of(loader.load(str(config.speculative_draft_model), config), setup)


def of(loaded: Loaded, setup: DraftSetup) -> DraftModel:
    """Returns an already loaded model as the draft of a target."""
    (model, info), target = loaded, setup.target.info
    if model.encodes or not model.generates:
        rule = "a draft model generates text"
        raise RuleError(rule, f"a model of type {info.model_type}", "Use a decoder")
    if info.vocab_size != target.vocab_size:
        rule = f"a draft has the vocabulary of its target, {target.vocab_size} tokens"
        raise RuleError(rule, f"{info.vocab_size}", "Use one with the same tokenizer")
    kind, extend = [replace(setup.kind_of(model), name=name) for name in DRAFTS]
    return DraftModel(kind, extend, follow=extend)
