"""What `certify` runs: a model with one layer of each kind, a sequence on pages that it has computed once, and steps over it.

A `Sequence` holds the bits of every row it knows; a step computes some of them again, in any company: alone, in chunks, behind a
prefix, as nodes of a tree, in a batch of many requests. Requests are forks of the sequence, so no prefix is computed twice. `Sources` is
the same for steps that keep nothing: an encoder's, and embeddings. Knows no tolerance and no verdict; the pages, plans and the runner
are the engine's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import order
from lockstep.attention.base import Backend
from lockstep.config import EngineConfig
from lockstep.kv.pages import PagePool
from lockstep.kv.tables import Table, pages_for
from lockstep.models.bart import Bart
from lockstep.models.bert import Bert
from lockstep.models.weights import Info
from lockstep.nn.decoder import Decoder, Model
from lockstep.plan.build import Pages, Work, build
from lockstep.plan.step import StepPlan
from lockstep.run.groups import Groups, encoder_of
from lockstep.run.runner import Runner
from lockstep.types import GroupSpec, Layout

CHUNK = 64  # rows by which the sequence is computed at first
WINDOW_MAX = 8192  # a window above this is not crossed: its keys would not fit the time
EDGE = 5  # rows on either side of a boundary
SOURCE_LEN = 70  # rows of an encoder's source: more than a tile


def one_of_each(model: Model) -> Model:
    """The model with one layer of each kind."""
    if isinstance(model, Decoder):
        kinds = list(dict.fromkeys(model.spec.blocks))
        first = [model.spec.blocks.index(kind) for kind in kinds]
        blocks = tuple(replace(model.blocks[i], attn=replace(model.blocks[i].attn, index=at)) for at, i in enumerate(first))
        return replace(model, spec=replace(model.spec, blocks=tuple(kinds)), blocks=blocks)
    if isinstance(model, Bert):
        return replace(model, blocks=model.blocks[:1])
    if isinstance(model, Bart):
        block = model.decoder.blocks[0]
        cross = replace(block.cross, index=1) if block.cross is not None else None
        decoder = replace(model.decoder, blocks=(replace(block, cross=cross),))
        return replace(model, encoder=replace(model.encoder, blocks=model.encoder.blocks[:1]), decoder=decoder)
    return model


@dataclass(frozen=True)
class Piece:
    """One request of a step: rows [begin, end) of the sequence behind its keys [0, begin).

    `branches` 0 computes plain rows; 1 makes them a chain of draft nodes, 2 a tree of two equal branches.
    """

    begin: int
    end: int
    branches: int = 0

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return (self.end - self.begin) * max(1, self.branches)

    @property
    def parents(self) -> tuple[int, ...] | None:
        """Node i of k branches hangs below node i - k: their nodes take turns."""
        return tuple(max(-1, i - self.branches) for i in range(self.rows)) if self.branches else None


@dataclass(frozen=True)
class Edges:
    """Positions at which the order of a sum changes, and how long a sequence is that crosses them."""

    whole: int  # positions [0, whole) are computed; behind them lie copies of their keys, up to the next run
    runs: tuple[tuple[int, int], ...]  # [begin, end) of rows that are computed alone; those above `whole` around a window's edge

    @property
    def length(self) -> int:
        """Keys of the sequence."""
        return max(self.whole, *(end for _, end in self.runs))

    @property
    def positions(self) -> list[int]:
        """Rows that are computed alone."""
        return [p for begin, end in self.runs for p in range(begin, end)]

    @staticmethod
    def of(specs: Many[GroupSpec], limit: int) -> Edges:
        """First tile, first split, every window where it begins to hide keys and where it leaves a tile; below `limit` positions."""
        tile = max(order.tile_len(s.d_qk, s.d_v) for s in specs)
        split = max(order.split_len(s.d_qk, s.d_v) for s in specs)
        windows = sorted({s.window for s in specs if s.window is not None and s.window <= WINDOW_MAX})
        whole = min(limit, split + tile)
        spans = [(0, EDGE), (tile - EDGE, tile + EDGE), (split - 3 * EDGE, split + 3 * EDGE)]
        for w in windows:
            spans += [(w - EDGE, w + EDGE), (w + tile - EDGE, w + tile + 2)]
        known = {p for begin, end in spans for p in range(max(0, begin), end) if p < limit}
        fill = (p for p in range(whole // 2, whole) if p not in known)
        known |= {p for _, p in zip(range(max(0, CHUNK - len(known))), fill, strict=False)}
        return Edges(whole, tuple(runs_of(sorted(known))))


def runs_of(positions: Many[int]) -> list[tuple[int, int]]:
    """Ascending positions as ranges [begin, end)."""
    starts = [p for i, p in enumerate(positions) if i == 0 or positions[i - 1] != p - 1]
    ends = [p + 1 for i, p in enumerate(positions) if i + 1 == len(positions) or positions[i + 1] != p + 1]
    return list(zip(starts, ends, strict=True))


class Sequence:
    """One request of a generating model, known row by row, and steps that compute its rows again."""

    def __init__(self, model: Model, backend: Backend, info: Info, config: EngineConfig) -> None:
        self.model, self.encoder = model, encoder_of(model, info)
        groups = Groups.of(model, self.encoder, config.page_size, config.kv_cache_dtype)
        self.specs, self.generate, self.encode = groups.specs, groups.generate, groups.encode
        self.edges = Edges.of([self.specs[g] for g in self.generate if self.specs[g].causal], model.max_position)
        self.source_len = min(SOURCE_LEN, model.max_position) if self.encoder is not None else 0
        pages = [self._pages(spec, config) for spec in self.specs]
        self.pools = [PagePool(n) if n else None for n in pages]
        self.runner = Runner(model, self.specs, pages, backend)
        gen = torch.Generator().manual_seed(0)
        self.ids = torch.randint(info.vocab_size, (max(self.edges.length, self.source_len),), generator=gen)
        self.table = Table(self.specs, self.pools)
        self.alone: dict[
            tuple[int, int], Table
        ] = {}  # requests of one row, kept for the next batch of such: by position, and which of several
        self.hidden = torch.full((self.edges.length, info.hidden_size), torch.nan)
        self._compute()

    def _pages(self, spec: GroupSpec, config: EngineConfig) -> int:
        """The sequence, the largest step in pages of its own, and room for pages that are begun, of keys and of nodes."""
        if spec.layout is Layout.FRESH:
            return 0
        rows = max(config.chunked_prefill_size, CHUNK)
        forks = len(self.edges.positions) + CHUNK + 2 * rows // self.edges.whole
        return pages_for(self.edges.length + rows, spec) + 4 * forks + 2

    def _compute(self) -> None:
        """Every row of the sequence for the first time, by chunks of CHUNK; copies of keys lie between the runs behind `whole`."""
        self.table.reserve(self.edges.length, cross_len=self.source_len)
        if self.encoder is not None:
            rows = self.source_len
            plan = self._plan(
                self.encode,
                [Work(0, rows, self._held(self.table, self.encode), (0,), None, rows, rows)],
            )
            self.runner.rows(plan, self.ids[:rows], self.encode, self.encoder.encoder_places, self.encoder.encode)
        done, whole = 0, self.edges.whole
        for begin, end in [
            *((at, min(at + CHUNK, whole)) for at in range(0, whole, CHUNK)),
            *self.edges.runs,
        ]:
            if end > done:
                self._copy_keys(done, begin)
                rows = self._run([Piece(begin, end)], [self.table])[0]
                self.hidden[begin:end] = rows
                done = end

    def _copy_keys(self, begin: int, end: int) -> None:
        """Positions [begin, end) get keys and values of rows that were computed."""
        if begin >= end:
            return
        source = np.random.default_rng(begin).integers(0, self.edges.whole, end - begin).astype(np.int32)
        for g in self.generate:
            pool = self.runner.pools[g]
            if pool is not None and self.specs[g].causal:
                slots = [self.table.slots(g, at) for at in (source, np.arange(begin, end, dtype=np.int32))]
                pool.move(torch.from_numpy(np.stack(slots, 1)))

    def _held(self, table: Table, groups: Many[int]) -> tuple[Pages | None, ...]:
        return tuple(table.pages(g) for g in groups)

    def _plan(self, groups: Many[int], works: Many[Work]) -> StepPlan:
        return build([self.specs[g] for g in groups], works)

    def _run(self, pieces: Many[Piece], tables: Many[Table]) -> tuple[Tensor, Tensor]:
        """The rows of a step, and their positions."""
        works = []
        for piece, table in zip(pieces, tables, strict=True):
            table.reserve(piece.end, piece.rows if piece.branches else 0, self.source_len)
            pages = self._held(table, self.generate)
            works.append(Work(piece.begin, piece.rows, pages, (0,), piece.parents, self.source_len))
        plan = self._plan(self.generate, works)
        positions = torch.from_numpy(plan.positions.astype(np.int64))
        rows = self.runner.rows(plan, self.ids[positions], self.generate, self.model.places)
        for table in tables:
            table.moved()
        return rows, positions

    def differs(self, pieces: Many[Piece]) -> bool:
        """Computes the pieces in one step; whether a row has other bits than the sequence has."""
        seen: Counter[int] = Counter()
        tables, passing = [], []
        for piece in pieces:
            if piece.rows == 1 and not piece.branches:
                tables.append(self._single(piece, seen[piece.begin]))
                seen[piece.begin] += 1
            else:
                tables.append(self._fork(piece))
                passing.append(tables[-1])
        rows, positions = self._run(pieces, tables)
        for table in passing:
            table.close()
        return not same(rows, self.hidden[positions])

    def keys_differ(self, position: int) -> bool:
        """Whether the row that was computed alone stored other keys than the sequence has."""
        at = np.array([position], np.int32)
        for g in self.generate:
            pool = self.runner.pools[g]
            if pool is None or not self.specs[g].causal:
                continue
            mine, theirs = (torch.from_numpy(t.slots(g, at).astype(np.int64)) for t in (self.alone[position, 0], self.table))
            for storage in (s for layer in pool.storages for s in layer):
                bits = storage.view(torch.uint8)
                if not torch.equal(bits[mine], bits[theirs]):
                    return True
        return False

    def _single(self, piece: Piece, nth: int) -> Table:
        key = (piece.begin, nth)
        if key not in self.alone:
            self.alone[key] = self._fork(piece)
        return self.alone[key]

    def _fork(self, piece: Piece) -> Table:
        """A request with the first keys of the sequence, without those that its windows have left."""
        table = self.table.fork(piece.begin)
        table.release(piece.begin)
        return table


class Sources:
    """Whole requests of steps that keep nothing: sources of an encoder, or texts to embed."""

    def __init__(self, model: Model, backend: Backend, info: Info, config: EngineConfig) -> None:
        self.model, self.encoder, self.limit = model, encoder_of(model, info), model.max_position
        groups = Groups.of(model, self.encoder, config.page_size, config.kv_cache_dtype)
        self.specs, self.groups = groups.specs, groups.encode or groups.embed
        rows = max(config.chunked_prefill_size, CHUNK) + 2 * order.split_len(0, 0)
        pages = [0 if s.layout is Layout.FRESH else pages_for(rows, s) + 2 * CHUNK + 2 for s in self.specs]
        self.pools = [PagePool(n) if n else None for n in pages]
        self.runner = Runner(model, self.specs, pages, backend)
        self.ids = torch.randint(info.vocab_size, (self.limit + CHUNK,), generator=torch.Generator().manual_seed(1))
        self.known: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}

    def alone(self, request: tuple[int, int]) -> Tensor:
        """The rows of tokens [begin, end) as a request of their own: what they must be in every step."""
        if request not in self.known:
            (self.known[request],) = self._run([request])
        return self.known[request][0]

    def differs(self, requests: Many[tuple[int, int]]) -> bool:
        """Computes requests in one step; whether one has other bits than alone, in its rows or the keys it leaves."""
        for request, (rows, keys) in zip(requests, self._run(requests), strict=True):
            want, want_keys = self.known[request]
            if not same(rows, want) or not all(torch.equal(a, b) for a, b in zip(keys, want_keys, strict=True)):
                return True
        return False

    def _run(self, requests: Many[tuple[int, int]]) -> list[tuple[Tensor, list[Tensor]]]:
        """Rows of every request, and what it stored for the decoder."""
        tables, works = [], []
        for begin, end in requests:
            table, rows = Table(self.specs, self.pools), end - begin
            table.reserve(0, cross_len=rows)
            cross = (rows, rows) if self.encoder is not None else (0, 0)
            works.append(Work(0, rows, tuple(table.pages(g) for g in self.groups), (0,), None, *cross))
            tables.append(table)
        plan = build([self.specs[g] for g in self.groups], works)
        ids = torch.cat([self.ids[begin:end] for begin, end in requests])
        forward: Any = (self.encoder.encoder_places, self.encoder.encode) if self.encoder is not None else (self.model.places,)
        hidden = self.runner.rows(plan, ids, self.groups, *forward)
        parts = hidden.split([end - begin for begin, end in requests])
        out = [(rows, self._stored(table, len(rows))) for rows, table in zip(parts, tables, strict=True)]
        for table in tables:
            table.close()
        return out

    def _stored(self, table: Table, rows: int) -> list[Tensor]:
        """Copies of the keys and values that the step wrote, as bytes."""
        out = []
        for g in self.groups:
            pool = self.runner.pools[g]
            if pool is not None:
                slots = torch.from_numpy(table.slots(g, np.arange(rows, dtype=np.int32)).astype(np.int64))
                out += [s.view(torch.uint8)[slots] for layer in pool.storages for s in layer]
        return out


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 tensors have the same bits."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
