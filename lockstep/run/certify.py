"""Proof, on this machine and at load, that a row's bits do not depend on the rows beside it.

One layer of each kind that the model has, with embedding, norms, attention, feed-forward and head,
computes a sequence whose rows are on both sides of a tile, a split and every window. Rows of it are
then computed alone, and again in every kind of step that the engine has: decoding batches, chunks
after a prefix, whole prompts, mixtures, chains and trees of drafts, sources of an encoder,
embeddings; with 1 to 64 rows, and with more in multiples of 64 up to the largest step (above 1,024
by doubling, 8,192 at most); with one, two and all threads; padded, where the engine pads. Every row
must have the bits that it has alone. The digest of these bits, and of every layer's kind, is part
of the fingerprint: two machines that agree on it computed the same numbers.

The sequence is one request on pages, computed once; steps compute rows again for forks of it, so
that no prefix is computed twice. Tables, plans and the runner are the engine's own; the engine
calls this when it is loaded.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep import order
from lockstep.attention.base import Backend
from lockstep.config import EngineConfig
from lockstep.kernels.cpu.threads import limited
from lockstep.kv.tables import PageTable, pages_for
from lockstep.models.bart import Bart
from lockstep.models.bert import Bert
from lockstep.models.loader import Info
from lockstep.nn.decoder import Decoder, Model
from lockstep.plan.bucket import Buckets
from lockstep.run.kind import EMBED, ENCODE, GENERATE, Kinds, group_specs, kinds_of
from lockstep.run.runner import Share, StepDriver
from lockstep.types import GroupSpec, Layout, RuleError

ROWS = 64  # every row count up to this, and every multiple of it above
EVERY_MULTIPLE = 1024  # up to this many rows; then the counts double
MOST_ROWS = 8192  # of the largest step that is tried
HEAD_ROWS = (2, 3, 7, 16, 33, 64)
LOGITS = 1 << 25  # most logits of one step of the head
CHUNK = 64  # rows per chunk when the sequence is first computed
WINDOW_MAX = 8192  # wider windows are not crossed: their keys take too long
EDGE = 5  # rows on either side of a boundary
SOURCE_LEN = 70  # rows of an encoder's source: more than a tile
KINDS = ("decode", "chunks", "mixed", "drafts")
T = TypeVar("T")


class NotCertified(RuleError):
    """A row's bits depend on the rows beside it: this configuration must not be used."""


@dataclass(frozen=True, eq=False)
class Subject:
    """What is to be certified. `model` has one layer of each kind."""

    model: Model
    backend: Backend
    info: Info
    config: EngineConfig

    @cached_property
    def kinds(self) -> Kinds:
        return kinds_of(self.model, self.config.page_size, self.config.kv_cache_dtype)

    @property
    def device_class(self) -> str:
        """The device class that determines the order of its sums."""
        return order.device_class(self.model.ops.machine)

    def driver(self, keys: int, begun: int) -> StepDriver:
        """Returns a driver with pools for `keys`, the largest step, and `begun` partial pages."""
        keys += max(self.config.chunked_prefill_size, CHUNK)
        specs = group_specs(self.kinds.values())
        pages = [0 if s.layout is Layout.FRESH else pages_for(keys, s) + begun for s in specs]
        return StepDriver(self.kinds, pages, self.backend)

    @property
    def buckets(self) -> Buckets | None:
        """The engine's buckets, if it pads, and one more that can contain every step here."""
        sizes = self.config.bucket_sizes
        if sizes is None:
            return None
        split = tile_and_split(group_specs(self.kinds.values()), self.device_class)[1]
        largest = max(sizes[-1], 2 * split)
        grids = (sizes, self.config.request_bucket_sizes, self.config.emit_bucket_sizes)
        wide = [tuple(sorted({*(grid or sizes), largest})) for grid in grids]
        return Buckets(tokens=wide[0], requests=wide[1], emits=wide[2])


def one_of_each(model: Model) -> Model:
    """Returns the model with one layer of each kind."""
    if isinstance(model, Decoder):
        kinds = list(dict.fromkeys(model.spec.blocks))
        blocks = [model.blocks[model.spec.blocks.index(kind)] for kind in kinds]
        numbered = [replace(b, attn=replace(b.attn, index=at)) for at, b in enumerate(blocks)]
        spec = replace(model.spec, blocks=tuple(kinds))
        return replace(model, spec=spec, blocks=tuple(numbered))
    if isinstance(model, Bert | Bart):
        model = replace(model, encoder=replace(model.encoder, blocks=model.encoder.blocks[:1]))
    if isinstance(model, Bart):
        block = model.decoder.blocks[0]
        cross = replace(block.cross, index=1) if block.cross is not None else None
        decoder = replace(model.decoder, blocks=(replace(block, cross=cross),))
        model = replace(model, decoder=decoder)
    return model


class RowRange(NamedTuple):
    """One request of a step: rows [begin, end) of the sequence after its keys [0, begin).
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
    def parents(self) -> tuple[int, ...] | None:
        """Node i of k branches is a child of node i - k: the branches alternate."""
        nodes = tuple(max(-1, i - self.branches) for i in range(self.rows))
        return nodes if self.branches else None


class Edges(NamedTuple):
    """A sequence that crosses positions at which the order of a sum changes. [0, whole) is
    computed; the rows of `runs`, ranges [begin, end), also alone. Where these are past `whole`,
    around a window's edge, copies of keys fill the gap."""

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
    def of(cls, specs: Sequence[GroupSpec], limit: int, device_class: str = order.CPU) -> Self:
        """Covers the first tile and split, where windows hide keys or leave a tile; CHUNK rows."""
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


def tile_and_split(specs: Sequence[GroupSpec], device_class: str) -> tuple[int, int]:
    """Returns the longest tile and the longest first split of these groups, in keys."""
    orders = [order.attention_order(device_class, spec.d_qk, spec.d_v) for spec in specs]
    return max(each.tile for each in orders), max(each.splits.begin(1) for each in orders)


def consecutive(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the runs [begin, end) in a list whose positions may start over."""
    cuts = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    bounds = [0, *cuts, len(positions)]
    return [(positions[a], positions[b - 1] + 1) for a, b in pairwise(bounds)]


class KnownRequest:
    """One request of a generating model with every row known, and steps that recompute rows."""

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
        # forks for one plain row, kept for the next batch
        self.kept: defaultdict[RowRange, list[PageTable]] = defaultdict(list)
        shape = (length, subject.info.hidden_size)
        self.hidden = torch.full(shape, torch.nan, dtype=model.ops.dtype, device=model.ops.device)
        self._compute()

    def _compute(self) -> None:
        """Computes the source's keys and the sequence by chunks, copying keys into gaps."""
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
        """Lets the next step move copies of computed rows' keys and values to [begin, end)."""
        positions = np.arange(begin, end, dtype=np.int32)
        drawn = np.random.default_rng(begin).integers(0, self.edges.whole, len(positions))
        for g in self.groups:
            self.table.move(g, self.table.slots(g, drawn.astype(np.int32)), positions)

    def _run(self, ranges: Sequence[RowRange], tables: Sequence[PageTable]) -> Tensor:
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

    def differs(self, ranges: Sequence[RowRange]) -> bool:
        """Computes the ranges in one step; returns whether a row has other bits than known."""
        tables = [self._fork(part) for part in ranges]
        rows = self._run(ranges, tables)
        for part, table in zip(ranges, tables, strict=True):
            if part.rows == 1 and not part.branches:
                self.kept[part].append(table)
            else:
                table.close()
        return not same(rows, self.hidden[torch.cat([part.positions for part in ranges])])

    def differs_alone(self, position: int) -> bool:
        """Whether the bits of a row computed alone, or of the key it stored, differ."""
        row, at = RowRange(position, position + 1), np.array([position], np.int32)
        if self.differs([row]):
            return True
        tables = self.kept[row][0], self.table
        alone, known = (stored(self.driver, table, self.groups, at) for table in tables)
        return not all(map(same, alone, known))

    def _fork(self, part: RowRange) -> PageTable:
        """Returns a request with the sequence's first keys, without those outside its windows."""
        if self.kept[part]:
            return self.kept[part].pop()
        table = self.table.fork(part.begin)
        table.release(part.begin)
        return table


class Sources:
    """Whole requests of steps that cache nothing: sources of an encoder, or texts to embed."""

    def __init__(self, subject: Subject) -> None:
        self.limit = subject.model.max_position  # tokens of a request
        self.kind = subject.kinds.get(ENCODE) or subject.kinds[EMBED]
        tile, split = tile_and_split(self.kind.specs, subject.device_class)
        lens = (split + 5, 3, tile + 3, 1)  # two cross a split or a tile, two cross nothing
        self.longs = [(i, i + min(n, self.limit)) for i, n in enumerate(lens)]
        self.driver = subject.driver(2 * split, begun=2 * CHUNK + 2)
        generator, tokens = torch.Generator().manual_seed(1), self.limit + CHUNK
        self.ids = torch.randint(subject.info.vocab_size, (tokens,), generator=generator)
        self.known: dict[tuple[int, int], list[Tensor]] = {}

    def alone(self, request: tuple[int, int]) -> Tensor:
        """Returns a lone request's rows of tokens [begin, end): their bits in every step."""
        (self.known[request],) = self._run([request])
        return self.known[request][0]

    def differs(self, requests: Sequence[tuple[int, int]]) -> bool:
        """Computes requests in one step; returns whether any has other rows or keys than alone."""
        pairs = zip(requests, self._run(requests), strict=True)
        return any(not all(map(same, found, self.known[request])) for request, found in pairs)

    def _run(self, requests: Sequence[tuple[int, int]]) -> list[list[Tensor]]:
        """Returns each request's rows, and what it stored for the decoder."""
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
    driver: StepDriver, table: PageTable, groups: Sequence[int], positions: NDArray[np.int32]
) -> list[Tensor]:
    """Returns copies of a request's keys and values at these positions, as bytes, by layer."""
    out = []
    for g in groups:
        pool = driver.runner.pools[g]
        if pool is not None:
            slots = torch.from_numpy(table.slots(g, positions).astype(np.int64))
            out += [s.view(torch.uint8)[slots] for layer in pool.storages for s in layer]
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- the proofs; each yields the rows' values when computed alone ----


def certify(model: Model, backend: Backend, info: Info, config: EngineConfig | None = None) -> str:
    """Returns the digest of the bits, or "none" for a backend that promises no bits. Raises
    NotCertified, naming the first step that differs, unless every row keeps its bits."""
    if backend.caps.order != "canonical":
        return "none"
    config = (config or EngineConfig()).settled(str(model.ops.dtype).removeprefix("torch."))
    config = replace(config, chunked_prefill_size=min(config.chunked_prefill_size, MOST_ROWS))
    subject = Subject(one_of_each(model), backend, info, config)
    many = torch.get_num_threads()
    on_card = model.ops.device.type == "cuda"  # where CPU threads compute nothing
    threads = (1,) if on_card else tuple(sorted({1, min(2, many), many}))
    # the bits show neither the order of layers nor a window too wide to cross: digest these too
    layers = repr(model.spec.blocks) if isinstance(model, Decoder) else ""
    digest = hashlib.sha256(layers.encode())
    proofs = [_sequence] if model.generates else []
    proofs.append(_sources if model.encodes or not model.generates else _embeddings)
    with torch.no_grad():
        for alone in chain.from_iterable(proof(subject, threads) for proof in proofs):
            digest.update(alone.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def row_counts(largest: int) -> list[int]:
    """Returns multiples of ROWS up to the largest step, finally by doubling, and that step."""
    counts = list(range(ROWS, min(largest, EVERY_MULTIPLE) + 1, ROWS))
    while counts and EVERY_MULTIPLE <= counts[-1] and 2 * counts[-1] < largest:
        counts.append(2 * counts[-1])
    return [*counts, largest] if counts and counts[-1] < largest else counts


def _sequence(subject: Subject, threads: Sequence[int]) -> Iterator[Tensor]:
    """Proves rows alone, 1 to ROWS rows in every kind of step, then up to the largest step."""
    with limited(1):
        steps = KnownRequest(subject)
        alone = steps.edges.positions
    singles = [(f"position {p}, alone and in a chunk of {CHUNK}", p) for p in alone]
    _prove(1, steps.differs_alone, singles)
    steps.driver.runner.buckets = subject.buckets
    yield steps.hidden[alone]
    kinds = KINDS if subject.backend.caps.tails else KINDS[:-1]
    rows = [alone[i % len(alone)] for i in range(max(ROWS, len(alone)))]
    counts = row_counts(subject.config.chunked_prefill_size)
    whole = steps.edges.whole
    longs = [(f"{n} rows (long chunks)", large(n, i, whole)) for i, n in enumerate(counts)]
    for t, count in enumerate(threads):
        named = [(n, kinds[(n + t) % len(kinds)]) for n in range(1, ROWS + 1)]
        trials = [(f"{n} rows ({kind})", ranges(kind, ends(rows, n))) for n, kind in named]
        _prove(count, steps.differs, trials)
        _prove(count, steps.differs, longs if count == threads[-1] else longs[-1:])
    yield _head(subject, steps.hidden[alone[:ROWS]], threads)


def ends(items: list[T], n: int) -> list[T]:
    """Returns the first n items or, if n is odd, the last n."""
    return items[-n:] if n % 2 else items[:n]


def _prove(count: int, differs: Callable[[T], bool], trials: Iterable[tuple[str, T]]) -> None:
    """Raises unless every trial, with `count` threads, has the bits that it should have."""
    with limited(count):
        for what, rows in trials:
            if differs(rows):
                rule = "a row has the same bits whatever rows are computed with it"
                got = f"a difference at {what} and {count} threads"
                raise NotCertified(rule, got, "Use another attention backend")


def ranges(kind: str, positions: Sequence[int]) -> list[RowRange]:
    """Returns the rows at these positions as requests of a step, a row per position.

    decode: one row each; chunks: runs of rows; mixed: half of a run as a chunk, the other half row
    by row; drafts: runs as nodes, alternately two equal chains and one chain.
    """
    if kind == "decode":
        return [RowRange(p, p + 1) for p in positions]
    out: list[RowRange] = []
    for nth, (begin, end) in enumerate(consecutive(positions)):
        middle = begin + (end - begin) // 2
        if kind == "chunks":
            out.append(RowRange(begin, end))
        elif kind == "mixed":
            out += [RowRange(begin, middle)] if middle > begin else []
            out += [RowRange(p, p + 1) for p in range(middle, end)]
        elif nth % 2 or middle == begin:
            out.append(RowRange(begin, end, branches=1))
        else:  # the first half twice, and the row that an odd length leaves
            out.append(RowRange(begin, middle, branches=2))
            out += [RowRange(end - 1, end)] if (end - begin) % 2 else []
    return out


def large(rows: int, nth: int, whole: int) -> list[RowRange]:
    """Returns `rows` rows as whole prompts or, if nth is odd, as chunks and a decoding row.

    The first of these chunks is short: between half a tile and a little more than one.
    """
    prefix = min(nth % 2 * (7 * nth + 1), whole // 2)
    out: list[RowRange] = []
    if prefix:
        short = min(ROWS // 2 + 5 * nth, whole - prefix, rows - 1)
        out = [RowRange(whole - 1, whole), RowRange(prefix, prefix + short)]
    left = rows - sum(part.rows for part in out)
    while left > 0:
        end = min(prefix + left, whole)
        out.append(RowRange(prefix, end))
        left -= end - prefix
    return out


def _head(subject: Subject, rows: Tensor, threads: Sequence[int]) -> Tensor:
    """Proves, for some row counts, that the head gives a row its logits alone. Returns them."""
    logits = subject.model.logits
    with limited(1):
        want = torch.cat([logits(row[None]) for row in rows])

    def differs(chosen: Tensor) -> bool:
        return not same(logits(rows[chosen]), want[chosen])

    most = max(ROWS, min(subject.config.chunked_prefill_size, LOGITS // want.shape[1]))
    trials = [(f"{n} rows of the head", torch.arange(n) % len(rows)) for n in (*HEAD_ROWS, most)]
    for count in threads:
        _prove(count, differs, trials if count == threads[-1] else trials[:-1])
    return want


def _sources(subject: Subject, threads: Sequence[int]) -> Iterator[Tensor]:
    """Proves an encoder, whose rows see their whole request: requests alone and together."""
    ones = [(i, i + 1) for i in range(ROWS)]
    with limited(1):
        steps = Sources(subject)
        longs, block = steps.longs, (0, min(ROWS, steps.limit))
        alone = [steps.alone(request) for request in (*ones, *longs, block)]
    steps.driver.runner.buckets = subject.buckets
    trials = [(f"{n} rows (sources)", ends(ones, n)) for n in range(2, ROWS + 1)]
    trials += [(f"sources of {len(longs)} lengths", each) for each in (longs, longs[::-1])]
    for count in threads:
        _prove(count, steps.differs, trials)
    counts = row_counts(subject.config.chunked_prefill_size)[1:]
    blocks = [(f"{n} rows (sources)", [block] * (n // block[1])) for n in counts]
    _prove(threads[-1], steps.differs, blocks)
    yield from alone


def _embeddings(subject: Subject, threads: Sequence[int]) -> Iterator[Tensor]:
    """Proves a decoder's layers without a cache: requests of some lengths alone and together."""
    with limited(1):
        steps = Sources(subject)
        alone = [steps.alone(request) for request in steps.longs]
    steps.driver.runner.buckets = subject.buckets
    longs, what = steps.longs, f"embeddings of {len(steps.longs)} lengths"
    for count in threads:
        _prove(count, steps.differs, [(what, longs if count == threads[-1] else longs[1:])])
    yield from alone
