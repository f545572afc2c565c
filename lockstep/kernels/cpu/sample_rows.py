"""Sampling and log-probabilities of many rows: the texts of sample.py, compiled, on all threads.

Imports the compiler, which sample.py does not: its texts also serve parameters and tensors. A
thread takes whole rows, so how many there are changes no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from lockstep.kernels.cpu import sample, threads
from lockstep.kernels.cpu.lanes import float32_at, float64_at, int64_at, take
from lockstep.kernels.cpu.sample import choose, describe

PER_THREAD = 2**16  # logits that are worth another thread
CHOOSE, DESCRIBE = 0, 1  # what is done with a row
WORKERS, TAKEN = 80, 88  # bytes before the record's counters
OUTSIDE = ("bits_of", "float_of")  # of sample.py: what stands for them in compiled code is below


def choose_rows(x: Any, floats: Any, ints: Any, tokens: Any, states: Any) -> None:
    """Choose a token for every row. x float32 [S, V], floats float64 [S, 3], ints int64 [S, 5];
    tokens and states int64 [S]."""
    rows, vocab = x.shape
    workers = worth(rows, vocab)
    _run(
        CHOOSE,
        (x, floats, ints, np.empty((workers, vocab), np.float32), tokens, states),
        (rows, vocab, 0),
        workers,
    )


def describe_rows(x: Any, tokens: Any, chosen: Any, top_ids: Any, top_logs: Any) -> None:
    """Log-probabilities of every row: of its token, and of the best few. tokens int64 [S]; top_ids
    int64 [S, k]; the others float32."""
    rows, vocab = x.shape
    _run(
        DESCRIBE,
        (x, tokens, chosen, top_ids, top_logs, x),
        (rows, vocab, top_ids.shape[1]),
        worth(rows, vocab),
    )


def worth(rows: int, vocab: int) -> int:
    """How many threads are worth waking."""
    return max(1, min(rows, threads.count(), rows * vocab // PER_THREAD))


def _run(what: int, arrays: Sequence[Any], sizes: Sequence[int], workers: int) -> None:
    threads.run(compiled(), [what, *map(threads.where, arrays), *sizes], workers)


def units(at: Any) -> None:
    """Take rows until none is left. The record: what to do, six addresses, rows, vocabulary, best
    few; workers and rows taken so far."""
    record = int64_at(at)
    rows, vocab, few = record[7], record[8], record[9]
    mine = take(at + WORKERS)
    r = take(at + TAKEN)
    while r < rows:
        x = carray(float32_at(record[1] + 4 * vocab * r), vocab)
        if record[0] == CHOOSE:
            scratch = carray(float32_at(record[4] + 4 * vocab * mine), vocab)
            floats, ints = (
                carray(float64_at(record[2] + 24 * r), 3),
                carray(int64_at(record[3] + 40 * r), 5),
            )
            int64_at(record[5])[r], int64_at(record[6])[r] = choose(x, scratch, floats, ints)
        else:
            chosen = carray(float32_at(record[3] + 4 * r), 1)
            top_ids, top_logs = (
                carray(int64_at(record[4] + 8 * few * r), few),
                carray(float32_at(record[5] + 4 * few * r), few),
            )
            describe(x, int64_at(record[2])[r], chosen, top_ids, top_logs)
        r = take(at + TAKEN)


def build(cache: bool, **replaced: Callable[..., Any]) -> Any:
    """The kernel with some of the texts of sample.py replaced by name, for the lab; a replacement
    finds the others by their names."""
    names: dict[str, Any] = {**vars(sample), **globals()}
    unknown = sorted(set(replaced) - set(vars(sample)))
    if unknown:
        raise KeyError(f"no such text in the kernel: {unknown}")
    for name, text in {**vars(sample), **replaced}.items():
        if isinstance(text, FunctionType) and name not in OUTSIDE:
            names[name] = njit(error_model="numpy")(threads.relinked(text, names))
    names["bits_of"] = njit(lambda x: np.float64(x).view(np.int64))
    names["float_of"] = njit(lambda i: np.int64(i).view(np.float64))
    return threads.c_function("sampling", threads.relinked(units, names), cache)


@functools.cache
def compiled() -> Any:
    """The kernel of this machine, kept on disk."""
    return build(cache=True)
