"""Samples tokens and computes log-probabilities on the CPU: functions of one row, and the compiled
kernel, whose threads take whole rows.

The formulas are those of `sample/formulas.py`, compiled together with this file. Tokens are always
ordered by score, then by id. Probabilities are integers in units of 2^-42, whose sums are exact in
any order. Called through the table in ops.py.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from lockstep.kernels.cpu import threads
from lockstep.kernels.cpu.threads import ENTRIES, empty, float32_at, float64_at, int64_at
from lockstep.sample import formulas as f
from lockstep.sample.formulas import gumbel, ln, philox, weight, wide_float

BUCKETS = 2048  # of the score's distance to the best; the last one has all from 32 nats on
PER_NAT = np.float32(64)
GROUPS = 64  # of four tokens: noise is computed for 256 tokens at a time
ZERO, MINUS_INF = np.float32(0), np.float32(-np.inf)
LOGIT_NS = 1  # per logit on one thread
CHOOSE, DESCRIBE = 0, 1  # the operation on a row: sample a token; log-probabilities
bits_of = threads.njit(lambda x: np.float64(x).view(np.int64))  # replaces that of formulas
float_of = threads.njit(lambda i: np.int64(i).view(np.float64))  # and so does this


def key_of(x: Any) -> Any:
    """Returns a float32 as an int32 in the same order; -0 and 0 have one key."""
    bits = np.float32(x + ZERO).view(np.int32)
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


def rank(x: Any, i: Any, top_key: Any) -> Any:
    """Returns the rank of token i with score x: smaller is better, by score, then by id."""
    return (np.int64(top_key) - np.int64(key_of(x))) << f.ID_BITS | np.int64(i)


def score_of(key: Any) -> Any:
    """Returns the float32 with a given key."""
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


def largest_key(x: Any) -> Any:
    """Returns the key of the largest score."""
    top = np.int32(-0x7FFFFFFF)
    for i in range(len(x)):
        top = max(top, key_of(x[i]))
    return top


def largest_bits(x: Any) -> Any:
    """Returns the bits of the largest magnitude; those of a NaN are larger than those of inf."""
    largest = np.int32(0)
    for i in range(len(x)):
        largest = max(largest, np.float32(x[i]).view(np.int32) & np.int32(0x7FFFFFFF))
    return largest


def peak(x: Any) -> Any:
    """Returns (largest key, state) of a row of scores."""
    top = largest_key(x)
    if largest_bits(x) > f.KEY_INF:
        return top, f.NAN
    if top == f.KEY_INF:
        return top, f.INFINITE
    return top, f.EMPTY if top <= f.KEY_MINUS_INF else f.OK


def first_best(x: Any) -> Any:
    """Returns (token, state) for the largest score, the lowest id among equals."""
    top, state = peak(x)
    if state != f.OK:
        return f.NO_TOKEN, state
    token = 0
    while key_of(x[token]) != top:
        token += 1
    return token, f.OK


def exponential(x: Any, top: Any) -> Any:
    """Returns the integer weight of a score, relative to the best one."""
    return weight(np.float64(x) - np.float64(top))


def bucket(x: Any, top: Any) -> Any:
    """Returns the bucket of a score: never an earlier one than that of a better score."""
    d = (top - x) * PER_NAT
    return np.int64(d) if d < BUCKETS - 1 else np.int64(BUCKETS - 1)


def members(x: Any, top: Any, which: Any, count: Any) -> Any:
    """Returns the ranks of the `count` finite scores of a bucket, best first."""
    ranks, top_key, n = np.empty(count, np.int64), key_of(top), 0
    for i in range(len(x)):
        if x[i] > MINUS_INF and bucket(x[i], top) == which:
            ranks[n] = rank(x[i], i, top_key)
            n += 1
    return np.sort(ranks)


def last_kept(x: Any, top: Any, top_k: Any, top_p: Any) -> Any:
    """Returns the rank of the last token that top-k, then top-p, keep."""
    counts, sums = np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS, np.int64)
    for i in range(len(x)):
        if x[i] > MINUS_INF:
            at = bucket(x[i], top)
            counts[at] += 1
            sums[at] += exponential(x[i], top)
    last, total, left, b = np.int64(f.FARTHEST), np.int64(0), np.int64(top_k), 0
    while b < BUCKETS and counts[b] < left:
        total += sums[b]
        left -= counts[b]
        b += 1
    if b < BUCKETS:  # the k-th best is the left-th best of bucket b
        best = members(x, top, b, counts[b])
        for j in range(left):
            last = best[j]
            total += exponential(x[last & f.ID_MASK], top)
    if top_p >= 1:
        return last
    share = np.int64(math.ceil(wide_float(total) * top_p))
    need, b = max(np.int64(1), min(total, share)), 0  # at least 1, so that one token is kept
    while sums[b] < need:
        need -= sums[b]
        b += 1
    best, j = members(x, top, b, counts[b]), 0
    while need > 0:
        last = best[j]
        need -= exponential(x[last & f.ID_MASK], top)
        j += 1
    return last


def cut(x: Any, top: Any, top_k: Any, top_p: Any, min_log: Any) -> None:
    """Sets scores to -inf in place where top-k, top-p or min-p remove a token."""
    if top_k < len(x) or top_p < 1:
        last, top_key = last_kept(x, top, top_k, top_p), key_of(top)
        for i in range(len(x)):
            if rank(x[i], i, top_key) > last:
                x[i] = MINUS_INF
    if min_log > MINUS_INF:
        for i in range(len(x)):
            if np.float64(x[i]) - np.float64(top) < min_log:
                x[i] = MINUS_INF


def block_noise(first: Any, counter: Any, words: Any, noise: Any) -> None:
    """Writes noise of token first + 4 g + w to noise[w * GROUPS + g]. `counter`: as in formulas."""
    position, index, low, high = counter[0], counter[1], counter[2], counter[3]
    for g in range(GROUPS):
        w0, w1, w2, w3 = philox(np.int64(first // 4 + g), position, index, np.int64(0), low, high)
        words[g] = w0
        words[GROUPS + g] = w1
        words[2 * GROUPS + g] = w2
        words[3 * GROUPS + g] = w3
    for i in range(4 * GROUPS):
        noise[i] = gumbel(words[i])


def beaten(bound: Any, best: Any) -> Any:
    """Returns whether no token of a block with largest score `bound` can reach `best`."""
    return bound == MINUS_INF or bound + f.NOISE_MAX < best


def noisy_best(x: Any, counter: Any) -> Any:
    """Returns the token with the largest score plus noise, the lowest id among equals."""
    words, noise = np.empty(4 * GROUPS, np.int64), np.empty(4 * GROUPS, np.float32)
    best, token = MINUS_INF, f.NO_TOKEN
    for first in range(0, len(x), 4 * GROUPS):
        part = x[first : first + 4 * GROUPS]
        if beaten(score_of(largest_key(part)), best):
            continue
        block_noise(first, counter, words, noise)
        for i in range(len(part)):
            y = np.float32(part[i] + noise[i % 4 * GROUPS + i // 4])
            if y > best:
                best, token = y, first + i
    return token


def choose(x: Any, scratch: Any, floats: Any, ints: Any) -> Any:
    """Samples (token, state). floats: temperature, top-p, ln of min-p; ints: top-k, counter."""
    if floats[0] == 0:
        return first_best(x)
    temperature = np.float32(floats[0])
    for i in range(len(x)):
        scratch[i] = np.float32(x[i] / temperature) + ZERO
    top_key, state = peak(scratch)
    if state != f.OK:
        return f.NO_TOKEN, state
    cut(scratch, score_of(top_key), ints[0], floats[1], floats[2])
    return noisy_best(scratch, ints[1:]), f.OK


def log_prob(x: Any, top: Any, log_sum: Any) -> Any:
    """Returns ln of a probability, rounded once to float32; of probability 1 it is 0, never -0."""
    return np.float32((np.float64(x) - np.float64(top)) - log_sum + 0.0)


def best_few(x: Any, top_key: Any, ranks: Any) -> None:
    """Fills `ranks` with the smallest ranks of a row, ascending."""
    ranks[:] = f.FARTHEST
    k = len(ranks)
    for i in range(len(x)):
        mine = rank(x[i], i, top_key)
        if mine < ranks[k - 1]:
            j = k - 1
            while j > 0 and ranks[j - 1] > mine:
                ranks[j] = ranks[j - 1]
                j -= 1
            ranks[j] = mine


def describe(x: Any, token: Any, chosen: Any, top_ids: Any, top_logs: Any) -> None:
    """Writes ln of the probability of `token` to chosen[0], and the best len(top_ids) tokens with
    theirs; NaN and NO_TOKEN for a row whose state is not OK."""
    chosen[0], top_logs[:], top_ids[:] = np.nan, np.nan, f.NO_TOKEN
    top_key, state = peak(x)
    if state != f.OK:
        return
    top, denominator = score_of(top_key), np.int64(0)
    for i in range(len(x)):
        denominator += exponential(x[i], top)
    log_sum = ln(wide_float(denominator) * 2.0**-f.FRACTION)
    if token >= 0:
        chosen[0] = log_prob(x[token], top, log_sum)
    if len(top_ids):
        best_few(x, top_key, top_ids)
        for j in range(len(top_ids)):
            top_ids[j] &= f.ID_MASK
            top_logs[j] = log_prob(x[top_ids[j]], top, log_sum)


# ---- many rows ----


def sample_tokens(
    logits: Tensor, floats: Tensor, ints: Tensor, cuts: bool
) -> tuple[Tensor, Tensor]:
    """Returns token and state of every row. `cuts` is unused: each row's numbers decide it."""
    tokens, states = empty(len(logits), dtype=np.int64), empty(len(logits), dtype=np.int64)
    _run(CHOOSE, logits, 0, floats, ints, tokens, states)
    return tokens, states


def compute_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the log-probability of every row's token, and the k best tokens with theirs."""
    rows = len(logits)
    chosen, top, top_ids = empty(rows), empty(rows, k), empty(rows, k, dtype=np.int64)
    _run(DESCRIBE, logits, k, token_ids.contiguous(), chosen, top_ids, top)
    return chosen, top_ids, top


def _run(what: int, logits: Tensor, few: int, *tensors: Tensor) -> None:
    """Runs one call over the rows of logits; which tensors it takes depends on `what`."""
    rows, vocab = logits.shape
    cost_ns = rows * vocab * LOGIT_NS
    team = threads.team(rows, cost_ns)
    scratch = threads.memory(4 * vocab, team)
    entries = (what, vocab, few, scratch, *map(threads.address_of, (logits, *tensors)))
    threads.Call(compiled(), entries, rows, team, cost_ns).run()


def unit(at: Any, r: Any, worker: Any) -> None:
    """Computes one row. The entries are `_run`'s."""
    record = int64_at(at + ENTRIES)
    vocab, few = record[1], record[2]
    x = carray(float32_at(record[4] + 4 * vocab * r), vocab)
    if record[0] == CHOOSE:
        scratch = carray(float32_at(record[3] + 4 * vocab * worker), vocab)
        floats = carray(float64_at(record[5] + 8 * f.FLOATS * r), f.FLOATS)
        ints = carray(int64_at(record[6] + 8 * f.INTS * r), f.INTS)
        int64_at(record[7])[r], int64_at(record[8])[r] = choose(x, scratch, floats, ints)
    else:
        chosen = carray(float32_at(record[6] + 4 * r), 1)
        top_ids = carray(int64_at(record[7] + 8 * few * r), few)
        top_logs = carray(float32_at(record[8] + 4 * few * r), few)
        describe(x, int64_at(record[5])[r], chosen, top_ids, top_logs)


def build(**replaced: Callable[..., Any]) -> Any:
    """Compiles the kernel, with functions and formulas `replaced` by name for the lab."""
    names = threads.linked({**vars(f), **globals()}, replaced)
    return threads.kernel("sampling", names["unit"], cache=not replaced)


compiled = cache(lambda: build())  # the kernel, compiled once per process
