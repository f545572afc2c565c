"""Proof, on this machine and at load, that a row's bits do not depend on the rows beside it.

One layer of each kind that the model has, with embedding, norms, attention, feed-forward and head,
computes a sequence whose rows stand on both sides of a tile, a split and every window. Rows of it
are then computed alone, and again in every kind of step that the engine has: decoding batches,
chunks behind a prefix, whole prompts, mixtures, chains and trees of drafts, sources of an encoder,
embeddings; with 1 to 64 rows, and with more by steps of 64 up to the largest step (above 1,024 by
doubling, 8,192 at most); with one, two and all threads; padded, where the engine pads. Every row
must have the bits it has alone. The digest of these bits, and of what kind every layer is, is part
of the fingerprint: two machines that agree on it computed the same numbers.

Called by the engine when it is loaded. What is run stands in `probe`.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.config import EngineConfig
from lockstep.kernels.cpu.threads import limited
from lockstep.models.loader import Info
from lockstep.nn.decoder import Decoder, Model
from lockstep.run import probe
from lockstep.run.probe import RowRange, Sources, Subject, consecutive, same
from lockstep.types import RuleError

ROWS = 64  # every row count up to this, and every multiple of it above
EVERY_MULTIPLE = 1024  # up to so many rows; then the counts double
MOST_ROWS = 8192  # of a step that is tried
HEAD_ROWS = (2, 3, 7, 16, 33, 64)
LOGITS = 1 << 25  # of one step of the head, at most
KINDS = ("decode", "chunks", "mixed", "drafts")
T = TypeVar("T")


@dataclass(frozen=True)
class Certificate:
    """What was proven: the largest row count and the threads tried, and the digest of the bits."""

    rows: int
    threads: tuple[int, ...]
    digest: str


class NotCertified(RuleError):
    """A row depends on its company: this configuration must not be used."""


def certify(
    model: Model, backend: Backend, info: Info, config: EngineConfig | None = None
) -> Certificate:
    """Raises NotCertified, naming the first step that differs, unless every row keeps its bits.

    A backend that promises no bits has nothing to prove.
    """
    if backend.caps.order != "canonical":
        return Certificate(0, (), "none")
    config = (config or EngineConfig()).settled(str(model.ops.dtype).removeprefix("torch."))
    config = replace(config, chunked_prefill_size=min(config.chunked_prefill_size, MOST_ROWS))
    subject = Subject(probe.one_of_each(model), backend, info, config)
    many = torch.get_num_threads()
    on_card = model.ops.device.type == "cuda"  # where no thread of ours computes
    threads = (1,) if on_card else tuple(sorted({1, min(2, many), many}))
    # one layer of each kind is computed: in no bit is their order, nor a window too wide to cross
    layers = repr(model.spec.blocks) if isinstance(model, Decoder) else ""
    digest = hashlib.sha256(layers.encode())
    proofs = [_sequence] if model.generates else []
    proofs.append(_sources if info.encoder or not model.generates else _embeddings)
    with torch.no_grad():
        for alone in chain.from_iterable(proof(subject, threads) for proof in proofs):
            digest.update(alone.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return Certificate(max(ROWS, config.chunked_prefill_size), threads, digest.hexdigest()[:16])


def row_counts(largest: int) -> list[int]:
    """Multiples of ROWS up to the largest step, at last by doubling; and the largest itself."""
    counts = list(range(ROWS, min(largest, EVERY_MULTIPLE) + 1, ROWS))
    while counts and EVERY_MULTIPLE <= counts[-1] and 2 * counts[-1] < largest:
        counts.append(2 * counts[-1])
    return [*counts, largest] if counts and counts[-1] < largest else counts


# ---- generating steps; every proof yields what rows are when they are computed alone ----


def _sequence(subject: Subject, threads: Sequence[int]) -> Iterator[Tensor]:
    """Rows alone, then 1 to ROWS of them in every kind of step, then as many as a step may have."""
    with limited(1):
        steps = probe.Sequence(subject)
        alone = steps.edges.positions
        for p in alone:
            if steps.differs([RowRange(p, p + 1)]) or steps.keys_differ(p):
                _refuse(f"position {p}, alone and in a chunk of {probe.CHUNK}", 1)
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
    """The first n, or, where n is odd, the last."""
    return items[-n:] if n % 2 else items[:n]


def _prove(count: int, differs: Callable[[T], bool], trials: Iterable[tuple[str, T]]) -> None:
    """Raises unless every trial, with so many threads, has the bits that it should have."""
    with limited(count):
        for what, rows in trials:
            if differs(rows):
                _refuse(what, count)


def ranges(kind: str, positions: Sequence[int]) -> list[RowRange]:
    """The rows at these positions as requests of a step, as many rows as there are positions.

    decode: one row each; chunks: runs of rows; mixed: one half of a run as a chunk, the other row
    by row; drafts: runs as nodes, two equal chains and one chain in turns.
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
        else:  # twice the first half, and the row that an odd number leaves
            out.append(RowRange(begin, middle, branches=2))
            out += [RowRange(end - 1, end)] if (end - begin) % 2 else []
    return out


def large(rows: int, nth: int, whole: int) -> list[RowRange]:
    """So many rows as whole prompts, or, where nth is odd, as chunks and a decoding row.

    The first of these chunks is short: between half a tile and a little more than one.
    """
    prefix = min(nth % 2 * (7 * nth + 1), whole // 2)
    out = [RowRange(whole - 1, whole)] if prefix else []
    if prefix:
        short = min(ROWS // 2 + 5 * nth, whole - prefix, rows - 1)
        out.append(RowRange(prefix, prefix + short))
    left = rows - sum(part.rows for part in out)
    while left > 0:
        end = min(prefix + left, whole)
        out.append(RowRange(prefix, end))
        left -= end - prefix
    return out


def _head(subject: Subject, rows: Tensor, threads: Sequence[int]) -> Tensor:
    """Some row counts of the head: a row has the logits that it has alone. Returns those."""
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


# ---- steps that keep nothing ----


def _sources(subject: Subject, threads: Sequence[int]) -> Iterator[Tensor]:
    """An encoder, whose rows see all rows of their request: requests alone and together."""
    ones = [(i, i + 1) for i in range(ROWS)]
    with limited(1):
        steps = Sources(subject)
        longs, block = _long(steps), (0, min(ROWS, steps.limit))
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
    """A decoder's layers without a cache: requests of some lengths alone and together."""
    with limited(1):
        steps = Sources(subject)
        longs = _long(steps)
        alone = [steps.alone(request) for request in longs]
    steps.driver.runner.buckets = subject.buckets
    what = f"embeddings of {len(longs)} lengths"
    for count in threads:
        _prove(count, steps.differs, [(what, longs if count == threads[-1] else longs[1:])])
    yield from alone


def _long(steps: Sources) -> list[tuple[int, int]]:
    """Requests that cross a split, a tile, and nothing."""
    lengths = (steps.split + 5, 3, steps.tile + 3, 1)
    return [(i, i + min(n, steps.limit)) for i, n in enumerate(lengths)]


def _refuse(what: str, threads: int) -> None:
    rule = "a row has the same bits whatever rows are computed with it"
    got = f"a difference at {what} and {threads} threads"
    raise NotCertified(rule, got, "Use another GEMM kernel or backend")
