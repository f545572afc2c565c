"""A small engine for tests of models: steps by the lab's driver, in poisoned pools, and tiny models
made by transformers' own classes.

`Engine.step` computes rows of several requests in one step. Everything above a step (scheduling,
sampling, prefix trees) is left out on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lockstep.attention import select
from lockstep.kernels.cpu.ops import Ops
from lockstep.kv.pool import Pool
from lockstep.kv.tables import PageTable
from lockstep.run.kind import EMBED, ENCODE, GENERATE, group_specs, kinds_of
from lockstep.run.runner import Share, StepDriver
from lockstep.types import Layout

Batch = Sequence[tuple["Request", Sequence[int]]]
CPU = Ops()
SHARP = (
    "q_proj",
    "k_proj",
    "query",
    "key",
    "q_b_proj",
    "mlp.gate.weight",
    "router.weight",
    "fc1",
    "fc2",
)
PAGES = 4096  # slots of every pool


def poisoned(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a cache in which nothing was written yet; reading such a slot gives NaN."""
    return torch.full(shape, torch.nan, device=device).to(dtype)


@dataclass
class Request:
    """A sequence: its page table and how many keys are cached."""

    table: PageTable
    cached: int = 0
    cross: int = 0
    ids: list[int] = field(default_factory=list)


class Engine:
    """Pools for the groups of a model; `step` computes new rows of some requests."""

    def __init__(self, model: Any, page_size: int = 16) -> None:
        self.model = model
        self.kinds = kinds_of(model, page_size)
        specs = group_specs(self.kinds.values())
        pages = [0 if s.layout is Layout.FRESH else PAGES // s.page_size + 2 for s in specs]
        self.driver = StepDriver(self.kinds, pages, select.select("cpu", specs, "cpu")[0])
        self.driver.runner.pools = [
            Pool(spec, count, CPU, poisoned) if count else None
            for spec, count in zip(specs, pages, strict=True)
        ]

    def request(self) -> Request:
        return Request(self.driver.request())

    def fork(self, parent: Request, length: int) -> Request:
        """Returns a second request that starts from the first `length` keys of another."""
        return Request(parent.table.fork(length), length, parent.cross, parent.ids[:length])

    def step(self, batch: Batch) -> Tensor:
        """Computes every request's new ids in one step. Returns their hidden states."""
        shares = [Share(r.table, new, r.cached, cross_len=r.cross) for r, new in batch]
        out = self._run(GENERATE, shares)
        for request, new in batch:
            request.cached += len(new)
            request.ids += new
            request.table.release(request.cached)
        return out

    def encode(self, batch: Batch) -> Tensor:
        """Computes the encoder's rows of every request's source and stores their cross keys."""
        for request, source in batch:
            request.cross = len(source)
        return self._run(ENCODE, [Share(r.table, source) for r, source in batch])

    def embed(self, prompts: Sequence[Sequence[int]], how: str | None = None) -> Tensor:
        """Returns embeddings of whole prompts, computed in one step that keeps nothing."""
        hidden = self._run(EMBED, [Share(self.driver.request(), p) for p in prompts])
        return self.model.embed(hidden, [0, *accumulate(map(len, prompts))], how)

    def _run(self, kind: str, shares: list[Share]) -> Tensor:
        with torch.no_grad():
            return self.driver.step(self.kinds[kind], shares).rows

    def whole(
        self, ids: Sequence[int], chunk: int | None = None, request: Request | None = None
    ) -> Tensor:
        """Computes one request alone, in one step or in chunks. Returns its hidden states."""
        request = request or self.request()
        size = chunk or len(ids)
        return torch.cat(
            [self.step([(request, list(ids[at : at + size]))]) for at in range(0, len(ids), size)]
        )


def randomise(model: Any, seed: int = 0) -> Any:
    """Sets weights with which attention, routing, biases and sinks matter, and a tied head does not
    just repeat the last token."""
    generator = torch.Generator().manual_seed(seed)
    tied = 0.15 if model.config.tie_word_embeddings else 0.7
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            last = name.rsplit(".", 1)[-1]
            if not p.dtype.is_floating_point or "inv_freq" in last or last == "embed_scale":
                continue
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name.lower() and last == "weight":
                p.copy_(p + 0.2 * noise + (3.0 if "post_feedforward" in name else 0.0))
            elif "embed" in name or "shared.weight" in name:
                p.copy_(noise * (2.0 if "positions" in name else tied))
            elif p.ndim == 1 or last.endswith("bias"):
                p.copy_(noise * (1.0 if last == "sinks" else 0.2))
            else:
                gain = 2.0 if any(part in name for part in SHARP) else 1.0
                p.copy_(noise * gain / math.sqrt(p.shape[-1]))
    return model.eval()
