"""Proof, on this machine and at load, that a row's bits do not depend on the rows beside it.

One layer of each kind that the model has, with embedding, norms, attention, feed-forward and head, computes a sequence whose rows stand
on both sides of a tile, a split and every window. Rows of it are then computed alone, and again in every kind of step that the engine has:
decoding batches, chunks behind a prefix, whole prompts, mixtures, chains and trees of drafts, sources of an encoder, embeddings; with 1
to 64 rows, and with more by steps of 64 up to the largest step (above 1,024 by doubling); with one, two and all threads. Every row must have the bits it has alone.
The digest of these bits is part of the fingerprint: two machines that agree on it computed the same numbers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep import order
from lockstep.attention.base import Backend
from lockstep.config import EngineConfig
from lockstep.kernels.cpu.threads import limited
from lockstep.models.weights import Info
from lockstep.nn.decoder import Model
from lockstep.run import probe
from lockstep.run.probe import Piece, Sources, same
from lockstep.types import RuleError

ROWS = 64  # every row count up to this, and every multiple of it above
FEW = 1024  # above so many rows the counts double
LOGITS = 1 << 25  # of one step of the head
HEAD_ROWS = (2, 3, 7, 16, 33, 64)
KINDS = ("decode", "chunks", "mixed", "drafts")


@dataclass(frozen=True)
class Certificate:
    """What was proven: the largest row count and the threads tried, and the digest of the bits."""

    rows: int
    threads: tuple[int, ...]
    digest: str


class NotCertified(RuleError):
    """A row depends on its company: this configuration must not be used."""


def certify(model: Model, backend: Backend, info: Info, config: EngineConfig | None = None) -> Certificate:
    """Raises NotCertified, with the first step that differs, unless every row is the same everywhere.

    A backend that promises no bits has nothing to prove.
    """
    if backend.caps.order != "canonical":
        return Certificate(0, (), "none")
    config = config or EngineConfig()
    small = probe.one_of_each(model)
    many = torch.get_num_threads()
    threads = tuple(sorted({1, min(2, many), many}))
    digest = hashlib.sha256()
    with torch.no_grad():
        if small.generates:
            for rows in _sequence(small, backend, info, config, threads):
                digest.update(rows.numpy().tobytes())
        if not small.generates or info.encoder:
            proof = _sources(small, backend, info, config, threads)
        else:
            proof = _embeddings(small, backend, info, config, threads)
        for rows in proof:
            digest.update(rows.numpy().tobytes())
    return Certificate(max(ROWS, config.chunked_prefill_size), threads, digest.hexdigest()[:16])


def row_counts(largest: int) -> list[int]:
    """Multiples of ROWS up to the largest step, all of them up to FEW rows and then by doubling; the largest itself."""
    counts = list(range(ROWS, min(largest, FEW) + 1, ROWS))
    while counts and 2 * counts[-1] < largest and counts[-1] >= FEW:
        counts.append(2 * counts[-1])
    return [*counts, largest] if counts and counts[-1] < largest else counts


def _sequence(model: Model, backend: Backend, info: Info, config: EngineConfig, threads: Sequence[int]) -> Iterator[Tensor]:
    """Generating steps. Yields what was computed."""
    with limited(1):
        steps = probe.Sequence(model, backend, info, config)
        alone = steps.edges.positions
        for p in alone:
            if steps.differs([Piece(p, p + 1)]) or steps.keys_differ(p):
                _refuse(f"the row at position {p}, alone and in a chunk of {probe.CHUNK}", 1)
        yield steps.hidden[alone]
    rows = [alone[i % len(alone)] for i in range(max(ROWS, len(alone)))]
    kinds = KINDS if backend.caps.tails else KINDS[:-1]
    for t, count in enumerate(threads):
        with limited(count):
            for n in range(1, ROWS + 1):
                chosen = rows[-n:] if n % 2 else rows[:n]  # odd counts from the back, even ones from the front
                kind = kinds[(n + t) % len(kinds)]
                if steps.differs(pieces(kind, chosen)):
                    _refuse(f"{n} rows ({kind})", count)
            largest = row_counts(config.chunked_prefill_size)
            for k, n in enumerate(largest if count == threads[-1] else largest[-1:]):
                if steps.differs(large(n, k, steps.edges.whole)):
                    _refuse(f"{n} rows (long chunks)", count)
    yield _head(model, steps.hidden[alone], config.chunked_prefill_size, threads)


def pieces(kind: str, positions: Sequence[int]) -> list[Piece]:
    """The rows at these positions as requests: one each, runs of them, both in turns, or runs as drafts: chains and trees in turns."""
    if kind == "decode":
        return [Piece(p, p + 1) for p in positions]
    out: list[Piece] = []
    for nth, (begin, end) in enumerate(consecutive(positions)):
        half = (end - begin) // 2
        if kind == "chunks":
            out.append(Piece(begin, end))
        elif kind == "mixed":
            out += [Piece(begin, begin + half)] if half else []
            out += [Piece(p, p + 1) for p in range(begin + half, end)]
        elif nth % 2 or not half:
            out.append(Piece(begin, end, 1))
        else:  # twice half the rows, and the one that is left
            out += [
                Piece(begin, begin + half, 2),
                *([Piece(end - 1, end)] if (end - begin) % 2 else []),
            ]
    return out


def consecutive(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Runs [begin, end) in a list that may start over."""
    cuts = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    bounds = [0, *cuts, len(positions)]
    return [(positions[a], positions[b - 1] + 1) for a, b in itertools.pairwise(bounds)]


def large(rows: int, nth: int, whole: int) -> list[Piece]:
    """So many rows as whole prompts, or, in every other step, as chunks behind a prefix and one decoding row."""
    prefix = min(nth % 2 * (7 * nth + 1), whole // 2)
    out = [Piece(whole - 1, whole)] if prefix else []
    left = rows - len(out)
    while left > 0:
        end = min(prefix + left, whole)
        out.append(Piece(prefix, end))
        left -= end - prefix
    return out


def _head(model: Model, hidden: Tensor, largest: int, threads: Sequence[int]) -> Tensor:
    """The head over some row counts: the logits of a row are those that it has alone. Returns them."""
    rows = hidden[:ROWS]
    with limited(1):
        want = torch.cat([model.logits(rows[i : i + 1]) for i in range(len(rows))])
    most = max(ROWS, min(largest, LOGITS // want.shape[1]))
    for count in threads:
        with limited(count):
            for n in (*HEAD_ROWS, most) if count == threads[-1] else HEAD_ROWS:
                chosen = torch.arange(n) % len(rows)
                if not same(model.logits(rows[chosen]), want[chosen]):
                    _refuse(f"{n} rows of the head", count)
    return want


def _sources(model: Model, backend: Backend, info: Info, config: EngineConfig, threads: Sequence[int]) -> Iterator[Tensor]:
    """Whole requests of a model whose rows see all rows of theirs: an encoder. Yields what each had alone."""
    with limited(1):
        steps = Sources(model, backend, info, config)
        ones, longs = [(i, i + 1) for i in range(ROWS)], _long(steps)
        block = (0, min(ROWS, steps.limit))
        alone = [steps.alone(request) for request in (*ones, *longs, block)]
    for count in threads:
        with limited(count):
            for n in range(2, ROWS + 1):
                if steps.differs(ones[-n:] if n % 2 else ones[:n]):
                    _refuse(f"{n} rows (sources)", count)
            for requests in (longs, longs[::-1]):
                if steps.differs(requests):
                    _refuse(
                        f"{sum(b - a for a, b in requests)} rows (sources of {len(longs)} lengths)",
                        count,
                    )
    with limited(threads[-1]):
        for n in row_counts(config.chunked_prefill_size)[1:]:
            if steps.differs([block] * (n // block[1])):
                _refuse(f"{n} rows (sources)", threads[-1])
    yield from alone


def _embeddings(model: Model, backend: Backend, info: Info, config: EngineConfig, threads: Sequence[int]) -> Iterator[Tensor]:
    """A decoder's layers without a cache: some lengths alone and together. Yields what each had alone."""
    with limited(1):
        steps = Sources(model, backend, info, config)
        longs = _long(steps)
        alone = [steps.alone(request) for request in longs]
    for count in threads:
        with limited(count):
            if steps.differs(longs if count == threads[-1] else longs[1:]):
                _refuse(f"embeddings of {len(longs)} lengths", count)
    yield from alone


def _long(steps: Sources) -> list[tuple[int, int]]:
    """Requests that cross a split, a tile, and nothing."""
    specs = [steps.specs[g] for g in steps.groups]
    tile = max(order.tile_len(s.d_qk, s.d_v) for s in specs)
    split = max(order.split_len(s.d_qk, s.d_v) for s in specs)
    lengths = (split + 5, 3, tile + 3, 1)
    return [(i, i + min(n, steps.limit)) for i, n in enumerate(lengths)]


def _refuse(what: str, threads: int) -> None:
    rule = "a row has the same bits whatever rows are computed with it"
    raise NotCertified(rule, f"a difference at {what} and {threads} threads", "Use another GEMM kernel or backend")
