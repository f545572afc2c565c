"""What `certify` runs: one layer of each kind of a model, and requests whose rows it knows.

A `Sequence` is one request on pages, computed once; a step computes some of its rows again, in any
company, for forks of it, so that no prefix is computed twice. `Sources` is the same for steps that
keep nothing. Knows no verdict; tables, plans and the runner are the engine's own.
"""

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep import order
from lockstep.attention.base import Backend
from lockstep.config import EngineConfig
from lockstep.kv.tables import PageTable, pages_for
from lockstep.models.bart import Bart
from lockstep.models.bert import Bert
from lockstep.models.loader import Info
from lockstep.nn.decoder import Decoder, Model
from lockstep.plan.bucket import Buckets
from lockstep.run.driver import Share, StepDriver
from lockstep.run.kind import EMBED, ENCODE, GENERATE, Kinds, group_specs, kinds_of
from lockstep.types import GroupSpec, Layout

CHUNK = 64  # rows by which the sequence is computed at first
WINDOW_MAX = 8192  # a wider window is not crossed: so many keys take too long
EDGE = 5  # rows on either side of a boundary
SOURCE_LEN = 70  # rows of an encoder's source: more than a tile


@dataclass(frozen=True, eq=False)
class Subject:
    """What is to be certified. `model` has one layer of each kind."""

    model: Model
    backend: Backend
    info: Info
    config: EngineConfig

    @cached_property
    def kinds(self) -> Kinds:
        return kinds_of(self.model, self.info, self.config.page_size, self.config.kv_cache_dtype)

    @property
    def device_class(self) -> str:
        """Whose order its sums have."""
        return order.device_class(self.model.ops.machine)

    def driver(self, keys: int, begun: int) -> StepDriver:
        """Runs steps on pools of so many keys, the largest step's, and pages that are begun."""
        keys += max(self.config.chunked_prefill_size, CHUNK)
        specs = group_specs(self.kinds.values())
        pages = [0 if s.layout is Layout.FRESH else pages_for(keys, s) + begun for s in specs]
        return StepDriver(self.kinds, pages, self.backend)

    @property
    def buckets(self) -> Buckets | None:
        """What the engine pads steps to, if it does, and one that holds every step here."""
        sizes = self.config.bucket_sizes
        if sizes is None:
            return None
        split = tile_and_split(group_specs(self.kinds.values()), self.device_class)[1]
        largest = max(sizes[-1], 2 * split)
        grids = (sizes, self.config.request_bucket_sizes, self.config.emit_bucket_sizes)
        wide = [None if grid is None else tuple(sorted({*grid, largest})) for grid in grids]
        return Buckets(tokens=wide[0] or sizes, requests=wide[1], emits=wide[2])


def one_of_each(model: Model) -> Model:
    """The model with one layer of each kind."""
    if isinstance(model, Decoder):
        kinds = list(dict.fromkeys(model.spec.blocks))
        blocks = [model.blocks[model.spec.blocks.index(kind)] for kind in kinds]
        numbered = [replace(b, attn=replace(b.attn, index=at)) for at, b in enumerate(blocks)]
        spec = replace(model.spec, blocks=tuple(kinds))
        return replace(model, spec=spec, blocks=tuple(numbered))
    if isinstance(model, Bert):
        return replace(model, encoder=replace(model.encoder, blocks=model.encoder.blocks[:1]))
    if isinstance(model, Bart):
        block = model.decoder.blocks[0]
        cross = replace(block.cross, index=1) if block.cross is not None else None
        decoder = replace(model.decoder, blocks=(replace(block, cross=cross),))
        encoder = replace(model.encoder, blocks=model.encoder.blocks[:1])
        return replace(model, encoder=encoder, decoder=decoder)
    return model


@dataclass(frozen=True)
class RowRange:
    """One request of a step: rows [begin, end) of the sequence behind its keys [0, begin).
    `branches` 0 computes plain rows; 1 makes them a chain of draft nodes, 2 two equal chains."""

    begin: int
    end: int
    branches: int = 0

    @property
    def rows(self) -> int:
        return (self.end - self.begin) * max(1, self.branches)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.begin, self.end).repeat_interleave(max(1, self.branches))

    @property
    def alone(self) -> bool:
        """One row, not of a tree."""
        return self.rows == 1 and not self.branches

    @property
    def parents(self) -> tuple[int, ...] | None:
        """Node i of k branches hangs below node i - k: their nodes take turns."""
        nodes = tuple(max(-1, i - self.branches) for i in range(self.rows))
        return nodes if self.branches else None


@dataclass(frozen=True)
class Edges:
    """A sequence that crosses positions at which the order of a sum changes. [0, whole) is
    computed; the rows of `runs`, ranges [begin, end), alone as well; where these lie behind
    `whole`, around a window's edge, copies of keys fill the space between."""

    whole: int
    runs: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return max(self.whole, *(end for _, end in self.runs))

    @property
    def positions(self) -> list[int]:
        """Rows that are computed alone."""
        return [p for begin, end in self.runs for p in range(begin, end)]

    @classmethod
    def of(cls, specs: Many[GroupSpec], limit: int, device_class: str = order.CPU) -> Self:
        """The first tile and split, where a window hides keys and leaves a tile; CHUNK rows."""
        tile, split = tile_and_split(specs, device_class)
        whole = min(limit, split + tile)
        spans = [(0, EDGE), (tile - EDGE, tile + EDGE), (split - 3 * EDGE, split + 3 * EDGE)]
        for window in {s.window for s in specs if s.window is not None}:
            if window <= WINDOW_MAX:
                spans.append((window - EDGE, window + EDGE))
                spans.append((window + tile - EDGE, window + tile + 2))
        known = {p for begin, end in spans for p in range(max(0, begin), min(end, limit))}
        others = [p for p in range(whole // 2, whole) if p not in known]
        known.update(others[: max(0, CHUNK - len(known))])
        return cls(whole, tuple(consecutive(sorted(known))))


def tile_and_split(specs: Many[GroupSpec], device_class: str) -> tuple[int, int]:
    """The longest tile and the longest first split of these groups, in keys."""
    orders = [order.attention_order(device_class, spec.d_qk, spec.d_v) for spec in specs]
    return max(each.tile for each in orders), max(each.splits.begin(1) for each in orders)


def consecutive(positions: Many[int]) -> list[tuple[int, int]]:
    """Runs [begin, end) in a list that may start over."""
    cuts = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    bounds = [0, *cuts, len(positions)]
    return [(positions[a], positions[b - 1] + 1) for a, b in pairwise(bounds)]


class Sequence:
    """One request of a generating model, known row by row, and steps that compute rows again."""

    def __init__(self, subject: Subject) -> None:
        model, self.kinds, self.generate = subject.model, subject.kinds, subject.kinds[GENERATE]
        causal = [spec for spec in self.generate.specs if spec.causal]
        self.edges = Edges.of(causal, model.max_position, subject.device_class)
        self.source_len = min(SOURCE_LEN, model.max_position) if ENCODE in self.kinds else 0
        length, rows = self.edges.length, max(subject.config.chunked_prefill_size, CHUNK)
        forks = len(self.edges.positions) + CHUNK + 2 * rows // self.edges.whole
        self.driver = subject.driver(length, begun=4 * forks + 2)
        generator, tokens = torch.Generator().manual_seed(0), max(length, self.source_len)
        self.ids = torch.randint(subject.info.vocab_size, (tokens,), generator=generator)
        self.table = self.driver.request()
        pairs = zip(self.generate.groups, self.generate.specs, strict=True)
        self.groups = [g for g, spec in pairs if spec.causal]
        # requests of one row, and which of several such: kept for the next batch
        self.kept: dict[tuple[RowRange, int], PageTable] = {}
        shape = (length, subject.info.hidden_size)
        self.hidden = torch.full(shape, torch.nan, dtype=model.ops.dtype, device=model.ops.device)
        self._compute()

    def _compute(self) -> None:
        """The source's keys, every row of the sequence by chunks, and the copies between."""
        self.table.reserve(self.edges.length, cross_len=self.source_len)
        if self.source_len:
            source = Share(self.table, self.ids[: self.source_len], emit=(0,))
            self.driver.step(self.kinds[ENCODE], [source])
        whole, done = self.edges.whole, 0
        chunks = [(at, min(at + CHUNK, whole)) for at in range(0, whole, CHUNK)]
        for begin, end in [*chunks, *self.edges.runs]:
            if end > done:
                self._copy_keys(done, begin)
                self.hidden[begin:end] = self._run([RowRange(begin, end)], [self.table])
                done = end

    def _copy_keys(self, begin: int, end: int) -> None:
        """Positions [begin, end) get keys and values of rows that were computed."""
        drawn = np.random.default_rng(begin).integers(0, self.edges.whole, max(0, end - begin))
        positions = drawn.astype(np.int32), np.arange(begin, end, dtype=np.int32)
        for g in self.groups if begin < end else ():
            moves = np.stack([self.table.slots(g, each) for each in positions], 1)
            pool = self.driver.runner.pools[g]
            if pool is not None:
                pool.move(torch.from_numpy(moves).to(pool.ops.device))

    def _run(self, ranges: Many[RowRange], tables: Many[PageTable]) -> Tensor:
        shares = [
            Share(
                request=table,
                ids=self.ids[part.positions],
                cached_len=part.begin,
                parents=part.parents,
                emit=(0,),
                cross_len=self.source_len,
            )
            for part, table in zip(ranges, tables, strict=True)
        ]
        return self.driver.step(self.generate, shares).rows

    def differs(self, ranges: Many[RowRange]) -> bool:
        """Computes the ranges in one step; whether a row has other bits than the sequence has."""
        seen: Counter[RowRange] = Counter()
        tables = []
        for part in ranges:
            key = part, seen[part]
            seen[part] += 1
            tables.append(self.kept.get(key) or self._fork(part))
            if part.alone:
                self.kept[key] = tables[-1]
        rows = self._run(ranges, tables)
        for part, table in zip(ranges, tables, strict=True):
            if not part.alone:
                table.close()
        return not same(rows, self.hidden[torch.cat([part.positions for part in ranges])])

    def keys_differ(self, position: int) -> bool:
        """Whether the row that was computed alone stored other keys than the sequence has."""
        at = np.array([position], np.int32)
        tables = self.kept[RowRange(position, position + 1), 0], self.table
        alone, known = (stored(self.driver, table, self.groups, at) for table in tables)
        return not all(map(same, alone, known))

    def _fork(self, part: RowRange) -> PageTable:
        """A request with the first keys of the sequence, without those behind its windows."""
        table = self.table.fork(part.begin)
        table.release(part.begin)
        return table


class Sources:
    """Whole requests of steps that keep nothing: sources of an encoder, or texts to embed."""

    def __init__(self, subject: Subject) -> None:
        self.limit = subject.model.max_position  # tokens of a request
        self.kind = subject.kinds.get(ENCODE) or subject.kinds[EMBED]
        self.tile, self.split = tile_and_split(self.kind.specs, subject.device_class)
        self.driver = subject.driver(2 * self.split, begun=2 * CHUNK + 2)
        generator, tokens = torch.Generator().manual_seed(1), self.limit + CHUNK
        self.ids = torch.randint(subject.info.vocab_size, (tokens,), generator=generator)
        self.known: dict[tuple[int, int], list[Tensor]] = {}

    def alone(self, request: tuple[int, int]) -> Tensor:
        """The rows of tokens [begin, end) as a lone request: what they must be in every step."""
        if request not in self.known:
            (self.known[request],) = self._run([request])
        return self.known[request][0]

    def differs(self, requests: Many[tuple[int, int]]) -> bool:
        """Computes requests in one step; whether rows or keys of one have other bits than alone."""
        pairs = zip(requests, self._run(requests), strict=True)
        return any(not all(map(same, found, self.known[request])) for request, found in pairs)

    def _run(self, requests: Many[tuple[int, int]]) -> list[list[Tensor]]:
        """Of every request its rows, and what it stored for the decoder."""
        tables, lens = [self.driver.request() for _ in requests], [b - a for a, b in requests]
        pairs = zip(tables, requests, strict=True)
        shares = [Share(table, self.ids[begin:end], emit=(0,)) for table, (begin, end) in pairs]
        hidden = self.driver.step(self.kind, shares).rows.split_with_sizes(lens)
        found = []
        for table, rows in zip(tables, hidden, strict=True):
            positions = np.arange(len(rows), dtype=np.int32)
            found.append([rows, *stored(self.driver, table, self.kind.groups, positions)])
            table.close()
        return found


def stored(
    driver: StepDriver, table: PageTable, groups: Many[int], positions: NDArray[np.int32]
) -> list[Tensor]:
    """Copies of a request's keys and values at these positions, as bytes, layer by layer."""
    out = []
    for g in groups:
        pool = driver.runner.pools[g]
        if pool is not None:
            slots = torch.from_numpy(table.slots(g, positions).astype(np.int64))
            out += [s.view(torch.uint8)[slots] for layer in pool.storages for s in layer]
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
