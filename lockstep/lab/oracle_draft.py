"""A draft with a fixed acceptance rate: the plain continuation, with errors drawn by seed.

It wraps a model's draft, an EAGLE-3 head with random weights, and lets it guess first, so every
guess costs what that model's would; only `propose`'s tokens are replaced. If the model's chain is
still on the device, the tokens are written in its place there. Answers are known by request id.
`lab bits` and the benchmark of a card put it into engines.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from lockstep.llm.engine import Engine
from lockstep.models.loader import Loaded
from lockstep.ops import to_device
from lockstep.plan.bucket import Buckets
from lockstep.run.kind import DRAFTS, VERIFY
from lockstep.run.runner import GUESSES
from lockstep.sched.request import DraftTree
from lockstep.spec import eagle3
from lockstep.spec.draft import DraftModel, DraftRequest, DraftSetup
from lockstep.spec.eagle import decoder
from lockstep.spec.model_draft import ModelDraft
from lockstep.types import RuleError

RIGHT = 0.8105  # chance of each guess: a + a^2 + a^3 = 2, so three yield 3.0 tokens a step
OPTIONS = {"speculative_algorithm": "eagle3", "speculative_num_steps": 3, "graphs": True}
COUNTERS = (*DRAFTS, VERIFY, "accepted_drafts", "rejected_drafts")  # of an engine that drafts
DRAFT_VOCAB = 32_000  # largest draft vocabulary of the head
Answers = Mapping[str, Sequence[int]]  # tokens by request id


class Oracle:
    """Replaces the guesses of `draft` by `answers`, by request id: each token is right with
    probability `right`, otherwise another token is proposed."""

    def __init__(self, draft: ModelDraft, answers: Answers, right: float) -> None:
        self.draft, self.knows_chances = draft, False
        self.observe, self.launched, self.lag = draft.observe, draft.launched, draft.lag
        self.known: dict[str, list[int]] = {}
        for name, answer in answers.items():
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            errs = rng.random(len(answer)) >= right
            others = rng.integers(1, draft.vocab_size, len(answer))
            tokens = np.where(errs, (answer + others) % draft.vocab_size, answer)
            self.known[name] = [*tokens.tolist(), *[0] * draft.steps]

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Returns trees of the draft's shapes, with the continuation along their first path."""
        trees = self.draft.propose(requests)
        told = [self._continuation(ask, tree) for ask, tree in zip(requests, trees, strict=True)]
        if not any(tree.token_ids and tree.token_ids[0] < 0 for tree in trees):
            return [DraftTree(ids, tree.parents) for ids, tree in zip(told, trees, strict=True)]
        rows = -1 - GUESSES - np.array([*chain.from_iterable(tree.token_ids for tree in trees)])
        room = np.zeros(rows.max() + 1, np.int64)
        room[rows] = [*chain.from_iterable(told)]
        runner = self.draft.runner
        runner.keep(to_device(torch.from_numpy(room), runner.ops.device), GUESSES)
        return trees

    def _continuation(self, ask: DraftRequest, tree: DraftTree) -> tuple[int, ...]:
        spec, tokens = ask.request.spec, tree.token_ids
        begin, node = len(ask.request.tokens) - len(spec.prompt), 0
        known = self.known[spec.request_id]
        if self.draft.top_k == 1:
            return tuple(known[begin : begin + len(tokens)])
        others = list(tokens)
        for token in known[begin:]:
            if node not in tree.parents:
                break
            node = tree.parents.index(node) + 1
            for i, parent in enumerate(tree.parents):  # siblings have different tokens
                if parent == tree.parents[node - 1] and others[i] == token:
                    others[i] = others[node - 1]
            others[node - 1] = token
        return tuple(others)


def install(engine: Engine, answers: Answers, right: float) -> None:
    """Makes this draft propose for the engine. Without a card, decoding steps get the buckets that
    they have on one."""
    speculation = engine.speculation
    if speculation is None or not isinstance(speculation.draft, ModelDraft):
        rule, remedy = "an oracle draft wraps a draft model", "Set speculative_algorithm"
        raise RuleError(rule, "an engine without one", remedy)
    speculation.draft = Oracle(speculation.draft, answers, right)
    if not engine.on_gpu:
        most, widths = engine.config.max_running_requests, speculation.shape.widths
        engine.runner.buckets = Buckets.for_decoding(most, 0, 0, widths)


def random_head(setup: DraftSetup) -> DraftModel:
    """Returns an EAGLE-3 head for the target, with random weights."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(head_config(setup.target)), "utf-8")
        drawn = replace(setup.config, speculative_draft_model=folder, load_format="dummy")
        return eagle3.load(replace(setup, config=drawn))


def head_config(target: Loaded) -> dict[str, Any]:
    """Shaped like published heads: size 128 or half a small model, four heads per KV head."""
    info, layers = target.info, len(decoder(target).blocks)
    size = min(128, info.hidden_size // 2)
    heads = info.hidden_size // size
    return {
        **{"architectures": [eagle3.ARCHITECTURE], "model_type": "llama", "hidden_act": "silu"},
        **{"hidden_size": info.hidden_size, "intermediate_size": 3 * info.hidden_size},
        **{"num_hidden_layers": 1, "num_attention_heads": heads, "head_dim": size},
        "num_key_value_heads": max(1, heads // 4),
        **{"vocab_size": info.vocab_size, "draft_vocab_size": min(DRAFT_VOCAB, info.vocab_size)},
        **{"max_position_embeddings": info.max_position, "rms_norm_eps": 1e-6},
        **{"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        **{"bos_token_id": None, "eos_token_id": None, "lockstep_states_every_field": True},
        "eagle_config": {eagle3.LAYERS: [0, layers // 2, layers - 1]},
    }
