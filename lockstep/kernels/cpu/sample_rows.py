"""Sampling and log-probabilities of many rows: the texts of sample.py, compiled, on all threads.

Imports the compiler, which sample.py does not. A thread takes whole rows, so how many there are
changes no bit. Called through the table, ops.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from lockstep.kernels.cpu import sample, threads
from lockstep.kernels.cpu.lanes import float32_at, float64_at, int64_at
from lockstep.kernels.cpu.sample import choose, describe
from lockstep.kernels.cpu.threads import ENTRIES, empty, where
from lockstep.sample import formulas
from lockstep.sample.formulas import FLOATS, INTS

LOGIT_NS = 1  # of one thread
CHOOSE, DESCRIBE = 0, 1  # what is done with a row


def sample_tokens(
    logits: Tensor, floats: Tensor, ints: Tensor, cuts: bool
) -> tuple[Tensor, Tensor]:
    """A token for every row, and what became of it. A row's own numbers say whether it is cut."""
    rows, vocab = logits.shape
    workers = worth(rows, vocab)
    tokens, states = empty(rows, dtype=np.int64), empty(rows, dtype=np.int64)
    settings, scratch = (where(floats), where(ints)), threads.memory(4 * vocab, workers)
    addresses = (where(logits), *settings, scratch, where(tokens), where(states))
    _run(CHOOSE, addresses, rows, (vocab, 0), workers)
    return tokens, states


def compute_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row's token, and the k best with theirs."""
    rows, vocab = logits.shape
    chosen, top, top_ids = empty(rows), empty(rows, k), empty(rows, k, dtype=np.int64)
    arrays = (logits, token_ids.contiguous(), chosen, top_ids, top, logits)
    _run(DESCRIBE, [where(each) for each in arrays], rows, (vocab, k), worth(rows, vocab))
    return chosen, top_ids, top


def worth(rows: int, vocab: int) -> int:
    """How many threads are worth waking."""
    return threads.team(rows, rows * vocab * LOGIT_NS)


def _run(
    what: int, addresses: Sequence[int], rows: int, sizes: Sequence[int], workers: int
) -> None:
    entries = (what, *addresses, *sizes)
    threads.run(compiled(), entries, rows, workers, rows * sizes[0] * LOGIT_NS)


def unit(at: Any, r: Any, worker: Any) -> None:
    """One row. The entries: what to do, six addresses, vocabulary, best few."""
    record = int64_at(at + ENTRIES)
    vocab, few = record[7], record[8]
    x = carray(float32_at(record[1] + 4 * vocab * r), vocab)
    if record[0] == CHOOSE:
        scratch = carray(float32_at(record[4] + 4 * vocab * worker), vocab)
        floats = carray(float64_at(record[2] + 8 * FLOATS * r), FLOATS)
        ints = carray(int64_at(record[3] + 8 * INTS * r), INTS)
        int64_at(record[5])[r], int64_at(record[6])[r] = choose(x, scratch, floats, ints)
    else:
        chosen = carray(float32_at(record[3] + 4 * r), 1)
        top_ids = carray(int64_at(record[4] + 8 * few * r), few)
        top_logs = carray(float32_at(record[5] + 4 * few * r), few)
        describe(x, int64_at(record[2])[r], chosen, top_ids, top_logs)


def build(cache: bool, **replaced: Callable[..., Any]) -> Any:
    """The kernel with some of the texts of sample.py and its formulas replaced by name, for the
    lab; a replacement finds the others by their names."""
    own = {
        "bits_of": threads.njit(lambda x: np.float64(x).view(np.int64)),
        "float_of": threads.njit(lambda i: np.int64(i).view(np.float64)),
    }
    names = threads.linked({**vars(formulas), **vars(sample), **globals(), **own}, replaced)
    return threads.kernel("sampling", names["unit"], cache)


@functools.cache
def compiled() -> Any:
    """The kernel of this machine, kept on disk."""
    return build(cache=True)
