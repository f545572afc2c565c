"""Proof, on this machine and at load, that a row's bits do not depend on the rows beside it.

One layer of each kind that the model has, with embedding, norms, attention, feed-forward and head, is run over row counts 1 to 64, at
every row position, with one and with all threads; each row must have the bits it has alone. The digest of these bits is part of the
fingerprint: two machines that agree on it computed the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.kernels.cpu.threads import limited
from lockstep.kv.pages import PagePool
from lockstep.kv.tables import Table
from lockstep.models.weights import Info
from lockstep.nn.decoder import Decoder, Model
from lockstep.plan.build import Work, build
from lockstep.plan.step import StepPlan
from lockstep.run.groups import Groups, encoder_of
from lockstep.run.runner import Runner
from lockstep.types import Layout, RuleError

ROWS = 64


@dataclass(frozen=True)
class Certificate:
    """What was proven: row counts and threads tried, and the digest of the bits."""

    rows: int
    threads: tuple[int, ...]
    digest: str


class NotCertified(RuleError):
    """A row depends on its company: this configuration must not be used."""


def certify(model: Model, backend: Backend, info: Info) -> Certificate:
    """Raises NotCertified, with the first row count that differs, unless every row is the same everywhere."""
    bench = Bench(probe(model), backend, info)
    ids = torch.randint(info.vocab_size, (ROWS,), generator=torch.Generator().manual_seed(0))
    many = torch.get_num_threads()
    counts = sorted({1, min(2, many), many})
    with limited(1):
        want = torch.cat([bench.rows(ids, i, i + 1) for i in range(ROWS)])
    for count in counts:
        with limited(count):
            for n in range(2, ROWS + 1):
                begin = ROWS - n if n % 2 else 0  # odd counts from the back, even ones from the front
                if not torch.equal(bench.rows(ids, begin, begin + n).view(torch.int32), want[begin : begin + n].view(torch.int32)):
                    rule = "a row has the same bits whatever rows are computed with it"
                    raise NotCertified(rule, f"a difference at {n} rows and {count} threads", "Use another GEMM kernel or backend")
    return Certificate(ROWS, tuple(counts), hashlib.sha256(want.numpy().tobytes()).hexdigest()[:16])


class Bench:
    """ROWS requests of one token each, any run of which can be computed together; each looks at an encoder's row of its own, if any."""

    def __init__(self, model: Model, backend: Backend, info: Info) -> None:
        self.model, self.encoder = model, encoder_of(model, info)
        self.groups = Groups.of(model, self.encoder)
        self.specs = self.groups.specs
        pools = [None if spec.layout is Layout.FRESH else PagePool(ROWS + 1) for spec in self.specs]
        self.tables = [Table(self.specs, pools) for _ in range(ROWS)]
        for table in self.tables:
            table.reserve(1, cross_len=1)
        self.runner = Runner(model, self.specs, [ROWS + 1] * len(self.specs), backend)

    def rows(self, ids: Tensor, begin: int, end: int) -> Tensor:
        """Logits, or hidden states, of requests [begin, end)."""
        ids = ids[begin:end]
        if self.encoder is not None:
            plan = self._plan(begin, end, self.groups.encode, cross_new=1)
            self.runner.rows(plan, ids, self.groups.encode, self.encoder.encoder_places, self.encoder.encode)
        hidden = self.runner.run(self._plan(begin, end, self.groups.generate), ids, self.groups.generate, self.model.places)
        return self.model.logits(hidden) if self.model.generates else hidden

    def _plan(self, begin: int, end: int, groups: Sequence[int], cross_new: int = 0) -> StepPlan:
        works = [Work(0, 1, tuple(t.pages(g) for g in groups), (0,), None, 1, cross_new) for t in self.tables[begin:end]]
        return build([self.specs[g] for g in groups], works)


def probe(model: Model) -> Model:
    """One layer of each kind; a model that is not a decoder is tried whole."""
    if not isinstance(model, Decoder):
        return model
    kinds = list(dict.fromkeys(model.spec.blocks))
    first = [model.spec.blocks.index(kind) for kind in kinds]
    blocks = tuple(replace(model.blocks[i], attn=replace(model.blocks[i].attn, index=at)) for at, i in enumerate(first))
    return replace(model, spec=replace(model.spec, blocks=tuple(kinds)), blocks=blocks)
