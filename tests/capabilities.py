"""What small models of every type answer on this processor as it is configured: digests of bits,
and fingerprints, as JSON.

    ATEN_CPU_CAPABILITY=default python tests/capabilities.py
    NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma python tests/capabilities.py gemma3_text-56

Run once per capability, each in a process of its own: equal answers show that no bit depends on the
width of the processor's vectors. Weights are uniform numbers of numpy's generator times a power of
two, because torch's normal numbers differ between capabilities. The head sizes are those whose
frequencies differed: torch's float32 pow has a vector body and a scalar tail.

Uses models and engines only; `operators` reports which of torch's operators a model's rows pass
through. test_capabilities.py calls both.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.config import EngineConfig
from lockstep.kernels.cpu.loops import TARGET
from lockstep.lab.tiny import assembled
from lockstep.llm.engine import Engine, Parts, prepare
from lockstep.models.loader import Loaded
from lockstep.nn.decoder import Decoder
from lockstep.plan.build import RequestWork, build
from lockstep.run.kind import EMBED
from lockstep.sample.params import SamplingParams
from lockstep.types import KV_FORMATS

TABLE = json.loads(Path(__file__).with_name("capabilities_models.json").read_text("utf-8"))
MODELS = {name: {**TABLE["common"], **own} for name, own in TABLE["models"].items()}
VOCAB = 83
CONTEXT = 700  # for prompts that cross tiles and splits
FAR = 131_071  # the last position of most long contexts
PROMPTS = (3, 70, 530)  # tokens
WHOLE = (3, 70, 180)  # lengths of prompts that are computed in one step: sources and embeddings
SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.95, seed=5, logprobs=4)
EDITED = SamplingParams(
    max_tokens=5,
    temperature=1.3,
    seed=6,
    logprobs=1,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.1,
    min_p=0.01,
    logit_bias={7: 1.5, 11: -0.3},
)
CONFIG = EngineConfig(
    context_length=CONTEXT, page_size=16, max_total_tokens=2048, chunked_prefill_size=192
)


def loaded(name: str) -> Loaded:
    """Returns a model of the table; its weights are a function of its name."""
    rng = np.random.default_rng(list(name.encode()))

    def take(tensor: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.from_numpy(rng.random(shape, np.float32) - np.float32(0.5))
        if "norm" in tensor.lower() and tensor.endswith("weight"):
            return values * 0.25 + 1.0
        return values * (0.5 if values.ndim == 1 else 2.0 ** -(shape[-1].bit_length() // 2 - 3))

    return assembled(MODELS[name], take)


def prompt(length: int) -> list[int]:
    """Returns token ids that do not repeat soon."""
    return [(7 * i + i * i // 11) % VOCAB for i in range(length)]


def digest(*arrays: Any) -> str:
    """Returns a digest of the bits of arrays."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model of the table, and engines that run it."""

    parts: Parts

    def engine(self, kv_cache_dtype: str = "float32") -> Engine:
        """Returns an engine whose chunks, pages and window are shorter than the prompts."""
        return Engine(replace(CONFIG, kv_cache_dtype=kv_cache_dtype), self.parts)

    def answers(self) -> dict[str, str]:
        """Returns digests of everything that the model can be asked for."""
        out = {}
        if isinstance(self.parts.model, Decoder):
            out = {
                "angles": self.angles(),
                "far": self.far(),
                "embed": self.embed(),
                "scores": self.scores(),
            }
        elif not self.parts.model.generates:
            out = {"embed": self.embed()}
        if self.parts.model.generates:
            lengths = WHOLE if self.parts.model.encodes else PROMPTS
            out["tokens"] = self.tokens(SAMPLED, lengths)
            for dtype in KV_FORMATS:
                out[f"edited, {dtype}"] = self.tokens(EDITED, lengths[:2], dtype)
        return out

    def tokens(
        self, params: SamplingParams, lengths: Sequence[int], kv_cache_dtype: str = "float32"
    ) -> str:
        """Returns a digest of sampled tokens and log-probabilities of prompts in one batch."""
        engine = self.engine(kv_cache_dtype)
        jobs = [engine.add(prompt(n), params) for n in lengths]
        finish(engine)
        done = [c for job in jobs for c in job.output("").completions]
        best = [
            np.array([score for _, score in top], np.float32)
            for c in done
            for top in c.top_logprobs or ()
        ]
        return digest(*(np.array(c.token_ids) for c in done), *(c.logprobs for c in done), *best)

    def scores(self) -> str:
        """Returns a digest of the log-probabilities of a prompt's tokens."""
        engine = self.engine()
        job = engine.add(
            prompt(PROMPTS[1]), SamplingParams(prompt_logprobs=True, seed=0), scores_only=True
        )
        finish(engine)
        return digest(job.output("").prompt_logprobs)

    def embed(self) -> str:
        """Returns a digest of embeddings."""
        engine = self.engine()
        jobs = [engine.add(prompt(n), SamplingParams(seed=0), embed=True) for n in WHOLE]
        finish(engine)
        return digest(*(job.embedding for job in jobs))

    def far(self) -> str:
        """Returns a digest of the logits of rows at the last positions up to FAR."""
        model, length = self.parts.model, PROMPTS[1]
        engine = self.engine()
        kind = engine.kinds[EMBED]
        plan = build(kind.specs, [RequestWork(0, length, (None,) * len(kind.specs))])

        def forward(ids: Tensor, positions: Tensor, step: Any) -> Tensor:
            return model(ids, positions + (FAR + 1 - length), step)

        ids = torch.tensor(prompt(length))
        hidden = engine.runner.run(plan, ids, replace(kind, forward=forward)).rows
        return digest(model.logits(hidden).numpy())

    def angles(self) -> str:
        """Returns a digest of cos and sin of every rope at near and far positions."""
        positions = torch.cat((torch.arange(64), torch.arange(0, FAR, 97), torch.tensor([FAR])))
        ropes = {block.attn.rope for block in self.parts.model.spec.blocks if block.attn.rope}  # type: ignore[attr-defined]
        tables = []
        for rope in sorted(ropes, key=lambda rope: rope.inv_freq):
            freqs = torch.tensor(rope.inv_freq)
            cos_sin = self.parts.model.ops.rope_cos_sin(positions.int(), freqs, rope.factor)
            tables += [part.numpy() for part in (freqs, *cos_sin)]
        return digest(*tables)


def finish(engine: Engine) -> None:
    """Steps until nothing is left to do."""
    while engine.busy:
        engine.step()


def subject(name: str) -> Subject:
    """Returns a model of the table, certified on this machine."""
    return Subject(prepare(loaded(name), None, CONFIG))


class Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of torch's operators that take or return floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        if any(tensor.is_floating_point() for tensor in tensors):
            self.names.add(str(func.overloadpacket))
        return out


def operators(name: str) -> set[str]:
    """Returns every such operator between a prompt and its answer, for a model of the table."""
    made, mode = subject(name), Noted()
    with mode:
        made.answers()
    return mode.names


def report(names: Sequence[str]) -> dict[str, Any]:
    """Returns answers and fingerprints of models, and what they were computed with."""
    models = {}
    for name in names:
        made = subject(name)
        models[name] = {"fingerprint": made.engine().fingerprint, "bits": made.answers()}
    return {
        "torch": torch.backends.cpu.get_cpu_capability(),
        "numba": list(TARGET),
        "models": models,
    }


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1:] or list(MODELS))))
