"""A small engine for tests of models: tables, pools, plans and steps, and tiny models made by
transformers' own classes.

`Engine.step` runs rows of several requests in one step; everything above a step (scheduling,
sampling, prefix trees) is missing on purpose.
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
from lockstep.kv.pages import PagePool
from lockstep.kv.pool import Pool
from lockstep.kv.tables import Table
from lockstep.plan.build import Work, build
from lockstep.plan.check import check
from lockstep.run.step import standalone
from lockstep.types import GroupSpec, Layout

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
    """A cache in which nothing was written yet: reading it shows."""
    return torch.full(shape, torch.nan, device=device).to(dtype)


@dataclass
class Request:
    """A sequence: its pages and how many keys are in them."""

    table: Table
    cached: int = 0
    cross: int = 0
    ids: list[int] = field(default_factory=list)


class Engine:
    """Pools for the groups of a model; `step` computes new rows of some requests."""

    def __init__(self, model: Any, page_size: int = 16) -> None:
        self.model, self.page_size = model, page_size
        self.specs = model.groups(page_size)
        self.backend, _ = select.select("cpu", self.specs, "cpu")
        made = [self._pool(s) for s in self.specs]
        self.pages, self.pools = [p for p, _ in made], [p for _, p in made]

    @staticmethod
    def _pool(spec: GroupSpec) -> tuple[PagePool | None, Pool | None]:
        if spec.layout is Layout.FRESH:
            return None, None
        count = PAGES // spec.page_size + 2
        return PagePool(count), Pool(spec, count, CPU, poisoned)

    def request(self) -> Request:
        return Request(Table(self.specs, self.pages))

    def fork(self, parent: Request, length: int) -> Request:
        """A second request that starts from the first `length` keys of another."""
        return Request(parent.table.fork(length), length, parent.cross, parent.ids[:length])

    def step(self, batch: Batch) -> Tensor:
        """The hidden rows of every request's new ids, computed in one step."""
        for request, new in batch:
            request.table.reserve(request.cached + len(new), cross_len=request.cross)
        works = [
            Work(r.cached, len(new), self._held(r, self.specs), cross_len=r.cross)
            for r, new in batch
        ]
        out = self._run(self.model, batch, works, self.specs, self.model.layer_map)
        for request, new in batch:
            request.cached += len(new)
            request.ids += new
            request.table.moved()
            request.table.release(request.cached)
        return out

    def encode(self, batch: Batch) -> Tensor:
        """The encoder's rows of every request's source; their cross keys are stored."""
        specs = self.model.encoder_groups(self.page_size)
        for request, source in batch:
            request.cross = len(source)
            request.table.reserve(0, cross_len=request.cross)
        works = [
            Work(0, len(s), self._held(r, specs), cross_len=len(s), cross_new=len(s))
            for r, s in batch
        ]
        return self._run(self.model.encode, batch, works, specs, self.model.encoder_layer_map)

    def embed(self, prompts: Sequence[Sequence[int]], how: str | None = None) -> Tensor:
        """Embeddings of whole prompts, in one step that keeps nothing."""
        specs = self.model.fresh_groups()
        batch = [(self.request(), p) for p in prompts]
        hidden = self._run(
            self.model,
            batch,
            [Work(0, len(p), (None,) * len(specs)) for p in prompts],
            specs,
            self.model.layer_map,
        )
        ends = [0, *accumulate(map(len, prompts))]
        return self.model.embed(hidden, ends, how)

    def _held(self, request: Request, specs: Sequence[GroupSpec]) -> tuple[Any, ...]:
        return tuple(
            None if s.layout is Layout.FRESH else request.table.pages(self.specs.index(s))
            for s in specs
        )

    def _run(
        self,
        run: Any,
        batch: Batch,
        works: list[Work],
        specs: Sequence[GroupSpec],
        places: Sequence[Any],
    ) -> Tensor:
        pools = [
            None if s.layout is Layout.FRESH else self.pools[self.specs.index(s)] for s in specs
        ]
        plan = build(specs, works)
        check(plan, tuple(p.num_pages if p else 0 for p in pools))
        step = standalone(plan, self.backend, pools, places)
        step.relocate()
        ids = torch.tensor([i for _, new in batch for i in new])
        with torch.no_grad():
            return run(ids, torch.from_numpy(plan.positions.copy()), step)

    def whole(
        self, ids: Sequence[int], chunk: int | None = None, request: Request | None = None
    ) -> Tensor:
        """One request, alone, all at once or in chunks."""
        request = request or self.request()
        size = chunk or len(ids)
        return torch.cat(
            [self.step([(request, list(ids[at : at + size]))]) for at in range(0, len(ids), size)]
        )


def randomise(model: Any, seed: int = 0) -> Any:
    """Weights with which attention, routing, biases and sinks matter, and a tied head does not just
    repeat the last token."""
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
